"""Which trainings are made: their numbers say what they are for."""

from collections.abc import Sequence

from recipes.faults.kinds import FAULTS
from recipes.faults.subject import draw_settings
from recipes.faults.training import Job

# Numbers of the trainings of each size into which faults are put; with experts; in which alerts are
# counted; and into which faults are put on another text. Trainings with numbers below 500 were
# looked at while the limits of alerts were chosen.
FAULTY, EXPERTS = range(500, 600), range(600, 700)
VERIFICATION, OTHER_TEXT = range(700, 800), range(800, 900)

MAIN_TEXT = range(500, 700)

# Updates of a healthy training, and of one in which alerts are counted.
STEPS, LONG = 850, 1_400
# The text that no limit was chosen with.
_OTHER_TEXT = "code"


def plan_odds(count: int, sizes: Sequence[str]) -> list[Job]:
    """List the trainings by which odds are measured, those of every kind in turn."""
    anywhere = tuple(name for name, fault in FAULTS.items() if not fault.block)
    of_experts = tuple(name for name, fault in FAULTS.items() if fault.block)
    jobs = []
    for number in range(count):
        for size in sizes:
            jobs.append(Job(draw_settings(size, FAULTY[number]), STEPS, anywhere))
            experts = draw_settings(size, EXPERTS[number], block="mixtral")
            jobs.append(Job(experts, STEPS, of_experts))
    return jobs


def plan_other_text(count: int) -> list[Job]:
    """List the trainings by which odds are measured on another text."""
    anywhere = tuple(name for name, fault in FAULTS.items() if not fault.block)
    return [
        Job(draw_settings("narrow", OTHER_TEXT[number], text=_OTHER_TEXT), STEPS, anywhere)
        for number in range(count)
    ]


def plan_verification(count: int) -> list[Job]:
    """List the healthy trainings in which alerts are counted: on all texts, and of another size."""
    return [
        Job(
            draw_settings(size, number, text=_OTHER_TEXT if number % 2 else ""), LONG, verifies=True
        )
        for number in VERIFICATION[: 2 * count]
        for size in ("narrow", "wide", "other")
    ]
