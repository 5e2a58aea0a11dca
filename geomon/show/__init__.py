"""Pictures and text made from readings: figures, pictures for loggers, the terminal, commands.

Names are imported on first use, because matplotlib and rich are optional.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomon.show.figures import geometry_figure, save
    from geomon.show.loggers.parts import Pictures
    from geomon.show.tables import Printer, run_table
    from geomon.show.terminal import view

__all__ = [
    "Pictures",
    "Printer",
    "geometry_figure",
    "run_table",
    "save",
    "view",
]

_MODULES = {
    "Pictures": "loggers.parts",
    "Printer": "tables",
    "geometry_figure": "figures",
    "run_table": "tables",
    "save": "figures",
    "view": "terminal",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
