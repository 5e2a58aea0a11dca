"""Make text from a record or a model safe to print on a terminal or write to a log."""

_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    r"""Replace characters that would act on a terminal instead of being shown.

    Control characters (which begin escape sequences), marks that change the writing direction, and
    unassigned code points become U+FFFD; line breaks and other white space become spaces. The
    length and all other characters stay the same.

    Args:
        text: Text of unknown origin.

    Example:
        >>> printable("layer\x1b[2J\nwide")
        'layer�[2J wide'
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def text_of(value: object) -> str:
    """Return a value as text, or its type if conversion fails.

    Args:
        value: Any object.

    Example:
        >>> text_of(["a"])
        "['a']"
    """
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def significant(value: float, digits: int) -> str:
    """Format a number with some significant digits, or with all digits before the decimal point.

    Args:
        value: Any number.
        digits: Number of significant digits.

    Example:
        >>> [significant(x, 2) for x in (0.0123, 12.34, 99.9, 1234.5, 1e9)]
        ['0.012', '12', '100', '1,234', '1e+09']
    """
    whole = 10**digits - 0.5 <= abs(value) < 1e6
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else _UNPRINTABLE
