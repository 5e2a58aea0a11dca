"""Numbers as pages print them: no more digits than a reader needs."""

import math


def number(value: float) -> str:
    """Format a value with two decimals below one, one below a hundred, and else none.

    Example:
        >>> number(0.256), number(1.0), number(5.31), number(100.0), number(math.nan)
        ('0.26', '1.0', '5.3', '100', 'none')
    """
    if not math.isfinite(value):
        return "none"
    size = abs(value)
    return f"{value:.2f}" if size < 1 else f"{value:.1f}" if size < 100 else f"{value:.0f}"


def with_margin(value: float, margin: float) -> str:
    """Format a value and the half width of its interval, with decimals according to that.

    Args:
        value: The value.
        margin: Half width of its 95 % interval; 0 where it is unknown.

    Example:
        >>> with_margin(5.312, 0.08), with_margin(5.312, 0.35), with_margin(5.312, 0.0)
        ('5.31 ± 0.08', '5.3 ± 0.3', '5.3')
    """
    decimals = 2 if 0 < margin < 0.095 and abs(value) < 100 else 1
    return f"{value:.{decimals}f} ± {margin:.{decimals}f}" if margin else number(value)


__all__ = ["number", "with_margin"]
