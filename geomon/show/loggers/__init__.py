"""Pages of loggers: charts, pictures, text and alerts of a run in progress.

Each page is a sink made of parts, so that one part can fail without affecting the others.
"""

from geomon.show.loggers.board import BoardPages, TensorBoard
from geomon.show.loggers.others import Logger, MLflow, Trackio
from geomon.show.loggers.wandb_run import WandB

__all__ = ["BoardPages", "Logger", "MLflow", "TensorBoard", "Trackio", "WandB"]
