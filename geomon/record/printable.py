"""Printable text: what a record or a model says, before it is written to a terminal or to a log."""

_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    r"""Replace the characters that would act on a terminal instead of being shown there.

    Control characters (escape sequences begin with one), the marks that turn the direction of
    writing, and code points without a character become U+FFFD; line breaks and other white space
    become spaces. The length stays the same, and so do all other characters.

    Args:
        text: Text of unknown origin.

    Example:
        >>> printable("layer\x1b[2J\nwide")
        'layer�[2J wide'
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def text_of(value: object) -> str:
    """Return a value as text, or its type if the value raises.

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


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else _UNPRINTABLE
