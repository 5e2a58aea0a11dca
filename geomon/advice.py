"""Advice on mistakes that several modules notice: packages to install, a class to import."""

# Packages of each extra of pyproject.toml.
PACKAGES = {
    "lightning": "lightning",
    "huggingface": "transformers accelerate",
    "tensorboard": "tensorboard",
    "wandb": "wandb plotly",
    "figures": "matplotlib",
    "terminal": "rich typer plotext",
    "report": "plotly jinja2",
    "export": "pandas pyarrow",
}


def to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names the packages, because the extra itself can be installed only from where geomon came, a
    checkout or a wheel.

    Args:
        extra: Name of an extra of pyproject.toml.

    Example:
        >>> to_install("terminal")
        'pip install rich typer plotext'
    """
    return f"pip install {PACKAGES[extra]}"


def lacks(callback: object, name: str, *, trainer: str, other: str, needs: str) -> AttributeError:
    """Make the error for an attribute that a callback lacks, such as an event of another trainer.

    Args:
        callback: The callback.
        name: Name of the attribute.
        trainer: Trainer that the callback is for.
        other: Another trainer, whose events the callback does not have.
        needs: Module with the class for the other trainer.
    """
    own = f"{type(callback).__module__}.{type(callback).__name__}"
    words = f"{own} has no attribute {name!r}"
    if name == "setup" or name.startswith("on_"):
        words = (
            f"{own} is for {trainer}: with {other}, write `from {needs} import GeometryMonitor` "
            f"({words})"
        )
    return AttributeError(words, name=name, obj=callback)


__all__ = ["PACKAGES", "lacks", "to_install"]
