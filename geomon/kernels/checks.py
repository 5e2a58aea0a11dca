"""What every kernel asks of its input, and the centring they share."""

from torch import Tensor


def require_rows(hidden: Tensor, *, at_least: int = 1) -> Tensor:
    """Give `hidden` back in float64 after checking that it is a matrix with enough rows.

    Args:
        hidden: Floating-point rows, [tokens, width].
        at_least: The smallest number of rows that makes sense for the caller.

    Raises:
        ValueError: Not a floating-point matrix, no columns, or too few rows.
    """
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"expected a floating-point tensor [tokens, width], got {hidden.dtype} "
            f"{list(hidden.shape)}: flatten the leading dimensions, or convert with .float()"
        )
    if hidden.shape[0] < at_least or hidden.shape[1] < 1:
        raise ValueError(
            f"expected at least {at_least} rows and 1 column, got {list(hidden.shape)}: "
            "give more tokens"
        )
    return hidden.double()


def centre(rows: Tensor) -> Tensor:
    """Rows without their mean.

    A row is taken off first: the mean of equal rows does not round to the row itself.

    Args:
        rows: [tokens, width], float64, at least one row.
    """
    shifted = rows - rows[0]
    return shifted.sub_(shifted.mean(dim=0))
