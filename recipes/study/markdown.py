"""Tables of Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> list[str]:
    r"""Write a table as lines.

    Example:
        >>> print("\n".join(table(["name", "count"], [["a|b", "3"]])))
        | name | count |
        |---|---:|
        | a\|b | 3 |
    """
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    lines = [" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row)
             for row in (head, *rows)]  # fmt: skip
    return [f"| {lines[0]} |", f"|{'|'.join(rule)}|", *(f"| {line} |" for line in lines[1:])]
