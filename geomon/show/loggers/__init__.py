"""Pages of loggers: charts, pictures, text and alerts of a run that goes on.

Each page is a sink that consists of parts. One that fails leaves the others as they are.
"""

from geomon.show.loggers.board import BoardPages, TensorBoard
from geomon.show.loggers.others import Logger, MLflow, Trackio
from geomon.show.loggers.wandb_run import WandB

__all__ = ["BoardPages", "Logger", "MLflow", "TensorBoard", "Trackio", "WandB"]
