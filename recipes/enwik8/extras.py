"""What the recipe needs beside geomon, looked for before anything heavy is imported."""

from importlib.util import find_spec

_NEEDED = (
    "lightning", "transformers", "matplotlib", "pooch", "rich", "typer",
)  # fmt: skip


def explain_missing(*names: str) -> str | None:
    """Return one line that says what is missing and how to install it; None for nothing.

    Args:
        names: Modules to look for; without any, those that every run needs.
    """
    missing = [name for name in names or _NEEDED if find_spec(name) is None]
    if not missing:
        return None
    return f"error: {', '.join(missing)} not installed: pip install 'geomon[all]'"
