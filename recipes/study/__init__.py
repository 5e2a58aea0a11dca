"""What the experiments share: claims beside what is measured, means over seeds, and trainings."""

from recipes.study.claim import Claim, load_claims, save_claims, verdict_lines
from recipes.study.runs import (
    RunError,
    begin_training,
    call,
    finish_training,
    is_finished,
    mark_finished,
    new_folder,
    read_kinds,
    run_side_by_side,
    seconds_of_kinds,
    seconds_on_two_cores,
    seed_folder,
    seed_folders,
    train_kinds,
)
from recipes.study.seeds import Estimate, Share, estimate, estimate_share

__all__ = [
    "Claim",
    "Estimate",
    "RunError",
    "Share",
    "begin_training",
    "call",
    "estimate",
    "estimate_share",
    "finish_training",
    "is_finished",
    "load_claims",
    "mark_finished",
    "new_folder",
    "read_kinds",
    "run_side_by_side",
    "save_claims",
    "seconds_of_kinds",
    "seconds_on_two_cores",
    "seed_folder",
    "seed_folders",
    "train_kinds",
    "verdict_lines",
]
