"""Draws a flowchart of Mermaid as SVG, because Mermaid itself is a script from the network."""

import re
from html import escape

_ARROW = re.compile(r"^(.+?)\s*(-->|-\.->)\s*(.+)$")
_NAMED = re.compile(r'(\w+)\["([^"]+)"\]')
_HEIGHT, _STEP, _LETTER, _GAP, _EDGE = 36, 92, 8.2, 28, 16


def draw(flowchart: str) -> str:
    """Return the SVG of a flowchart from top to bottom without circles."""
    labels, arrows = _read(flowchart)
    floors = _floors(labels, arrows)
    widths = {name: _LETTER * len(label) + 2 * _EDGE for name, label in labels.items()}
    rows = [[name for name in labels if floors[name] == n] for n in range(max(floors.values()) + 1)]
    total = max(sum(widths[name] + _GAP for name in row) for row in rows) + _GAP
    places: dict[str, tuple[float, float]] = {}
    for n, row in enumerate(rows):
        left = (total - sum(widths[name] + _GAP for name in row)) / 2 + _GAP / 2
        for name in row:
            places[name] = left + widths[name] / 2, _GAP + n * _STEP + _HEIGHT / 2
            left += widths[name] + _GAP
    drawn = [_arrow(places[start], places[end], dashed) for start, end, dashed in arrows]
    drawn += [_box(places[name], widths[name], label) for name, label in labels.items()]
    height = _GAP * 2 + (len(rows) - 1) * _STEP + _HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {height}" role="img" '
        'style="width:100%;max-width:52rem"><defs><marker id="tip" viewBox="0 0 8 8" refX="8" '
        'refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" '
        f'fill="currentColor"/></marker></defs>{"".join(drawn)}</svg>'
    )


def _read(flowchart: str) -> tuple[dict[str, str], list[tuple[str, str, bool]]]:
    """Return the label of each node and the arrows: start, end, whether it is dashed."""
    labels = dict(_NAMED.findall(flowchart))
    arrows = []
    for line in flowchart.splitlines():
        if found := _ARROW.match(_NAMED.sub(r"\1", line.strip())):
            starts, arrow, ends = found.groups()
            for start in starts.split(" & "):
                arrows += [(start, end, arrow != "-->") for end in ends.split(" & ")]
    for start, end, _ in arrows:
        labels.setdefault(start, start)
        labels.setdefault(end, end)
    return labels, arrows


def _floors(labels: dict[str, str], arrows: list[tuple[str, str, bool]]) -> dict[str, int]:
    """Return the floor of each node: one below the lowest that points at it."""
    floors = dict.fromkeys(labels, 0)
    for _ in labels:
        for start, end, _dashed in arrows:
            floors[end] = max(floors[end], floors[start] + 1)
    return floors


def _arrow(start: tuple[float, float], end: tuple[float, float], dashed: bool) -> str:
    (x0, y0), (x1, y1) = start, end
    y0, y1 = y0 + _HEIGHT / 2, y1 - _HEIGHT / 2
    middle = (y0 + y1) / 2
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<path d="M{x0:.0f} {y0:.0f}C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} '
        f'{y1:.0f}" fill="none" stroke="currentColor" opacity=".55"{dashes} '
        'marker-end="url(#tip)"/>'
    )


def _box(place: tuple[float, float], width: float, label: str) -> str:
    x, y = place
    return (
        f'<rect x="{x - width / 2:.0f}" y="{y - _HEIGHT / 2:.0f}" width="{width:.0f}" '
        f'height="{_HEIGHT}" rx="6" fill="#e8eaf6" stroke="#3f51b5"/><text x="{x:.0f}" '
        f'y="{y + 5:.0f}" text-anchor="middle" font-size="14" fill="#1a237e">{escape(label)}</text>'
    )
