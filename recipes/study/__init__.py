"""What the experiments share: claims beside what is measured, means over seeds, and trainings."""

from recipes.study.claim import Claim, load_claims, save_claims
from recipes.study.runs import (
    RunError,
    is_finished,
    mark_finished,
    new_folder,
    run_side_by_side,
    seconds_on_two_cores,
)
from recipes.study.seeds import Estimate, estimate

__all__ = [
    "Claim",
    "Estimate",
    "RunError",
    "estimate",
    "is_finished",
    "load_claims",
    "mark_finished",
    "new_folder",
    "run_side_by_side",
    "save_claims",
    "seconds_on_two_cores",
]
