"""What to install for the parts of geomon that need more packages.

Messages name the packages and not the extra, because an extra can be installed only from where
geomon itself came: a checkout or a wheel.
"""

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

    Args:
        extra: Name of an extra of pyproject.toml.

    Example:
        >>> to_install("terminal")
        'pip install rich typer plotext'
    """
    return f"pip install {PACKAGES[extra]}"


__all__ = ["PACKAGES", "to_install"]
