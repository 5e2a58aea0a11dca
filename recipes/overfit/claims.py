"""What the records say of the turns of the geometry beside that of the held-out loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from geomon import Readings
from geomon.record import tags
from recipes.overfit.train import TEXTS
from recipes.overfit.turns import Kind, first_turn
from recipes.study import Claim, estimate, read_kinds, seconds_of_kinds

HELD_OUT = tags.training_tag("held_out_loss")
TRAIN = tags.training_tag("train_loss")

# Changes that make an extremum a turning point, several times the scatter between readings.
_SHARE_OF_LOSS = 0.01
_SHARE_OF_GEOMETRY = 0.05
# Rise of the held-out loss, in nats, from which a run counts as overfitted.
_OVERFITTED = 0.05

_PICTURE = "docs/pictures/overfit.png"
# The authors' code names its experiments; their sections in the paper were not looked up.
_SOURCE = "2506.01034, abstract, experiment Local Dimensions Detect Overfitting"
_DIFFERS = (
    "A small character model trained from nothing, whose local dimension first rises; the paper "
    "fine-tunes a pretrained one."
)

Runs = dict[str, list[Readings]]


class Watched(NamedTuple):
    """A metric, and the kind of its turn.

    Attributes:
        metric: Name of the metric.
        kind: Whether it turns at a trough after its first peak, or the other way round.
    """

    metric: str
    kind: Kind


# Dimensions rise, fall, and may rise again; ranks fall, rise, and may fall again.
WATCHED = (
    Watched("local_dimension", "trough"),
    Watched("twonn", "trough"),
    Watched("effective_rank", "peak"),
    Watched("effective_rank_last", "peak"),
)


def load_runs(folder: Path) -> Runs:
    """Read the records of both trainings, one for each seed.

    Args:
        folder: Folder of the experiment.
    """
    return read_kinds(folder, TEXTS)


def last_layer(readings: Readings, metric: str) -> str:
    """Build the tag of a metric at the last layer, which the paper looks at.

    Args:
        readings: Readings of a run.
        metric: Name of the metric.
    """
    return tags.layer_tag(metric, max(readings.layers(metric)))


def loss_turn(readings: Readings) -> int | None:
    """Find the step at which the held-out loss turns; None where it does not.

    Args:
        readings: Readings of a run.
    """
    steps, values = readings.series(HELD_OUT)
    index = first_turn(values, _SHARE_OF_LOSS, "trough")
    return None if index is None else steps[index]


def geometry_turn(readings: Readings, watched: Watched) -> int | None:
    """Find the step at which a metric turns at the last layer; None where it does not.

    Args:
        readings: Readings of a run.
        watched: The metric.
    """
    steps, values = readings.series(last_layer(readings, watched.metric))
    index = first_turn(values, _SHARE_OF_GEOMETRY, watched.kind, after_other=True)
    return None if index is None else steps[index]


def leads(runs: Runs, watched: Watched) -> list[float]:
    """Measure by how many steps a metric turns before the held-out loss, on few texts.

    Args:
        runs: Records of the experiment.
        watched: The metric.

    Returns:
        Leads of the seeds in which both turn; below 0 where the metric turns later.
    """
    pairs = [(loss_turn(each), geometry_turn(each, watched)) for each in runs["few"]]
    return [float(loss - own) for loss, own in pairs if loss is not None and own is not None]


def rise_after_lowest(values: list[float]) -> float:
    """Compare the end of a curve with its lowest value.

    Args:
        values: Values of a curve, in order.
    """
    return values[-1] - min(values)


def claims(folder: Path) -> list[Claim]:
    """Compare the records of an experiment with what was published.

    Args:
        folder: Folder of the experiment, with a folder for each seed.
    """
    runs = load_runs(folder)
    seconds = seconds_of_kinds(folder, TEXTS)
    common: dict[str, Any] = {
        "command": "make overfit", "picture": _PICTURE, "differs": _DIFFERS, "seconds": seconds,
    }  # fmt: skip
    found = [*_losses(runs), *_turns(runs)]
    return [Claim(**common, **each) for each in found]


def table(folder: Path) -> list[str]:
    """Write where each metric turns, as lines of a Markdown table.

    Args:
        folder: Folder of the experiment.
    """
    runs = load_runs(folder)
    lines = [
        "| at the last layer | turns at | few texts: step | lead over the held-out loss (steps) "
        "| false alarms: turns on plenty of text |",
        "|---|---|---:|---:|---:|",
        f"| held-out loss | trough | {_listed(runs['few'], loss_turn)} | "
        f"| {_counted(runs['plenty'], loss_turn)} |",
    ]
    for watched in WATCHED:

        def turn(readings: Readings, of: Watched = watched) -> int | None:
            return geometry_turn(readings, of)

        found = leads(runs, watched)
        lead = f"{estimate(found).mean:.0f} ± {estimate(found).margin:.0f}" if found else "none"
        lines.append(
            f"| `{watched.metric}` | {watched.kind} | {_listed(runs['few'], turn)} | {lead} "
            f"| {_counted(runs['plenty'], turn)} |"
        )
    return lines


def _listed(runs: list[Readings], turn: Callable[[Readings], int | None]) -> str:
    found = [turn(readings) for readings in runs]
    return ", ".join("never" if step is None else str(step) for step in found)


def _counted(runs: list[Readings], turn: Callable[[Readings], int | None]) -> str:
    found = [step for readings in runs if (step := turn(readings)) is not None]
    steps = f" (at {', '.join(map(str, found))})" if found else ""
    return f"{len(found)} of {len(runs)}{steps}"


def _losses(runs: Runs) -> list[dict[str, Any]]:
    rises = {
        name: tuple(rise_after_lowest(each.series(HELD_OUT)[1]) for each in runs[name])
        for name in TEXTS
    }
    quantity = "rise of the held-out loss from its lowest value to the end, in nats"
    published = "the loss on held-out data rises while that on the training data falls"
    return [
        {
            "name": "few_texts_overfit",
            "asserts": "Trained on few texts the held-out loss turns.",
            "published": published, "source": _SOURCE, "quantity": quantity,
            "above": _OVERFITTED, "values": rises["few"],
        },
        {
            "name": "plenty_of_text_does_not_overfit",
            "asserts": "In the same number of steps on plenty of text it does not: the control.",
            "published": "no such control", "source": _SOURCE, "quantity": quantity,
            "below": _OVERFITTED, "values": rises["plenty"],
        },
    ]  # fmt: skip


def _turns(runs: Runs) -> list[dict[str, Any]]:
    local = WATCHED[0]
    turned = {
        name: tuple(float(geometry_turn(each, local) is not None) for each in runs[name])
        for name in TEXTS
    }
    quantity = (
        "share of the seeds in which the local dimension of the last layer has a trough after its "
        "first peak"
    )
    found: list[dict[str, Any]] = [
        {
            "name": "local_dimension_turns",
            "asserts": "Trained on few texts the local dimension of the last layer reaches a "
            "minimum and rises again.",
            "published": "its minimum marks the onset of overfitting", "source": _SOURCE,
            "quantity": quantity, "above": 0.5, "values": turned["few"], "counted": True,
        },
        {
            "name": "local_dimension_turns_with_overfitting_alone",
            "asserts": "On plenty of text, without overfitting, it does not rise again.",
            "published": "a rise signals overfitting", "source": _SOURCE,
            "quantity": quantity, "below": 0.5, "values": turned["plenty"], "counted": True,
        },
    ]  # fmt: skip
    lead = leads(runs, local)
    if lead:
        found.append(
            {
                "name": "local_dimension_turns_before_the_loss",
                "asserts": "The local dimension of the last layer turns before the held-out loss.",
                "published": "its minimum announces overfitting", "source": _SOURCE,
                "quantity": "lead of the local dimension over the held-out loss, in steps",
                "above": 0.0, "values": tuple(lead),
            }
        )  # fmt: skip
    return found
