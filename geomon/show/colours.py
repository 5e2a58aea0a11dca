"""Colours of lines, steps, layers and maps on all pages."""

from collections.abc import Sequence

# Okabe and Ito's colours, which colour-blind readers can distinguish.
BLUE, VERMILLION, GREEN, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#767676", "#000000"
PURPLE = "#A8488A"  # darker than Okabe and Ito's, for thin lines
# Colours of several runs or lines in one panel.
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, "#E69F00", "#56B4E9", BLACK)
# Viridis (for steps) and plasma (for layers) without their pale ends, which vanish on white.
STEPS = ("#440154", "#404387", "#29788E", "#22A784", "#79D151", "#C2C21D")
LAYERS = ("#0D0887", "#6A00A8", "#B12A90", "#E16462", "#F3A03A")
# Colour maps for values of both signs, and of one sign.
SIGNED, UNSIGNED = "RdBu_r", "cividis"
NOTHING = "#DDDDDD"  # missing values of a map
GRID = "#E6E6E6"
DASHES = ("solid", "dash", "dot", "dashdot")


def ramp(colours: Sequence[str], count: int) -> list[str]:
    """Interpolate `count` evenly spaced colours between at least two given ones.

    Example:
        >>> ramp(("#000000", "#FFFFFF"), 3)
        ['#000000', '#808080', '#FFFFFF']
    """
    chosen = []
    for index in range(count):
        place = index * (len(colours) - 1) / max(count - 1, 1)
        start = min(int(place), len(colours) - 2)
        pairs = zip(_parts(colours[start]), _parts(colours[start + 1]), strict=True)
        mixed = (round(one + (other - one) * (place - start)) for one, other in pairs)
        chosen.append("#{:02X}{:02X}{:02X}".format(*mixed))
    return chosen


def faded(colour: str, share: float) -> str:
    """Format a colour with an opacity from 0 to 1 for plotly and CSS.

    Example:
        >>> faded("#0072B2", 0.2)
        'rgba(0,114,178,0.2)'
    """
    return "rgba({},{},{},{})".format(*_parts(colour), share)


def _parts(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
