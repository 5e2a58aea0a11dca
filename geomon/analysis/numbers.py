"""Format numbers for pages with no more digits than a reader needs."""

import math


def number(value: float) -> str:
    """Format a value with two decimals below one, one decimal below a hundred, and none above.

    Example:
        >>> number(0.256), number(1.0), number(5.31), number(100.0), number(math.nan)
        ('0.26', '1.0', '5.3', '100', 'none')
    """
    if not math.isfinite(value):
        return "none"
    size = abs(value)
    return f"{value:.2f}" if size < 1 else f"{value:.1f}" if size < 100 else f"{value:.0f}"


def with_margin(value: float, margin: float) -> str:
    """Format a value and the half width of its interval, both with the decimals of the latter.

    Args:
        value: The value.
        margin: Half width of its 95 % interval; 0 if unknown.

    Example:
        >>> with_margin(5.312, 0.08), with_margin(312.4, 35.2), with_margin(5.312, 0.0)
        ('5.31 ± 0.08', '312 ± 35', '5.3')
        >>> with_margin(-1.04, 1.01)
        '-1.04 ± 1.01'
    """
    if not margin > 0:
        return number(value)
    exponent = math.floor(math.log10(1.05 * margin))  # a margin of 0.96 is printed as 1.0
    decimals = 1 if exponent == 0 else min(max(0, -exponent), 6)
    while (
        decimals < 6
        and abs(value) > margin
        and abs(round(value, decimals)) <= round(margin, decimals)
    ):
        decimals += 1  # a change beyond its margin must not look like none
    value = round(value, decimals) + 0.0  # not -0.0
    return f"{value:.{decimals}f} ± {margin:.{decimals}f}"


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
