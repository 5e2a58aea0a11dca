"""Tables of Markdown."""

from collections.abc import Iterable, Iterator, Sequence


def table(head: Sequence[str], rows: Iterable[Iterable[str]], *, words: int = 1) -> Iterator[str]:
    r"""Write a table as lines, each as soon as its row is there.

    Args:
        head: Names of the columns.
        rows: Cells of each row.
        words: Number of columns that are aligned to the left, the first ones.

    Example:
        >>> print("\n".join(table(["name", "count"], [["a|b", "3"]])))
        | name | count |
        |---|---:|
        | a\|b | 3 |
    """

    def line(cells: Iterable[str]) -> str:
        joined = " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        return f"| {joined} |"

    yield line(head)
    yield f"|{'---|' * words}{'---:|' * (len(head) - words)}"
    yield from map(line, rows)
