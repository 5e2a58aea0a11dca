"""Make text from a record or a model safe to print on a terminal or write to a log."""

from geomon.failures import failures

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
    except failures():
        return f"<{type(value).__name__}>"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else _UNPRINTABLE
