"""Pictures and text made from readings: figures, pictures for loggers, the terminal, commands.

Names are imported on first use, because matplotlib and rich are optional.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomon.show.commands import add_commands, exit_on_bad_input
    from geomon.show.figures import draw, geometry_figure, save
    from geomon.show.loggers import BoardPages, Logger, MLflow, TensorBoard, Trackio, WandB
    from geomon.show.loggers.parts import Pictures
    from geomon.show.tables import Printer, run_table
    from geomon.show.terminal import view

_MODULES = {
    "BoardPages": "loggers",
    "Logger": "loggers",
    "MLflow": "loggers",
    "Pictures": "loggers.parts",
    "Printer": "tables",
    "TensorBoard": "loggers",
    "Trackio": "loggers",
    "WandB": "loggers",
    "add_commands": "commands",
    "draw": "figures",
    "exit_on_bad_input": "commands",
    "geometry_figure": "figures",
    "run_table": "tables",
    "save": "figures",
    "view": "terminal",
}

__all__ = [
    "BoardPages",
    "Logger",
    "MLflow",
    "Pictures",
    "Printer",
    "TensorBoard",
    "Trackio",
    "WandB",
    "add_commands",
    "draw",
    "exit_on_bad_input",
    "geometry_figure",
    "run_table",
    "save",
    "view",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
