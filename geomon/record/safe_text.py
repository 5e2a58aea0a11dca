"""Write counts with their nouns, and make text safe to print on a terminal or write to a log."""

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


def with_noun(count: int, noun: str) -> str:
    """Return a count with its noun, which takes an s unless the count is one.

    Args:
        count: How many there are.
        noun: The noun for one.

    Example:
        >>> with_noun(1, "block"), with_noun(1200, "block")
        ('1 block', '1,200 blocks')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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
