"""What is asked of the numbers that people give."""


def check_counts(**counts: int) -> None:
    """Raise a `ValueError` for a count that is not a whole number of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is a whole number of at least 1, got {value!r}")


__all__ = ["check_counts"]
