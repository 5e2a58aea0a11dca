"""Few texts and many epochs: compares when the geometry and when the held-out loss turns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn
from typer import Option

from geomon import every, select
from geomon.record import tags
from recipes.enwik8.text import InputError, Text, spread
from recipes.overfit.turns import Kind, first_turn
from recipes.study.claim import Claim, Question, answers
from recipes.study.drawing import BLUE, GREY, ORANGE, draw_seeds, explain_seeds, label_panel
from recipes.study.experiment import Experiment, Runs, check_heads
from recipes.study.history import History
from recipes.study.markdown import table
from recipes.study.metrics import local_dimension
from recipes.study.model import Architecture, Transformer
from recipes.study.seeds import estimate
from recipes.study.text import next_characters, random_windows
from recipes.study.training import Training, Watch, warm_up

HELD_OUT = tags.training_tag("held_out_loss")
TRAIN = tags.training_tag("train_loss")

# Changes that make an extremum a turning point, several times the scatter between readings.
_SHARE_OF_LOSS = 0.01
_SHARE_OF_GEOMETRY = 0.05
# A run counts as overfitted if its held-out loss rises by this many nats.
_OVERFITTED = 0.05
# Sequences of the probe: twice the width, so that ranks at their last tokens are meaningful.
_SEQUENCES = 128
_ROWS = 2048
# Number of windows for each loss.
_LOSS_WINDOWS = 64

# The authors' code names its experiments; their sections in the paper were not looked up.
_SOURCE = "2506.01034, abstract"


class Watched(NamedTuple):
    """A metric and the kind of its turn.

    Attributes:
        metric: Name of the metric.
        kind: "trough" if it turns at a trough after its first peak, "peak" for the opposite.
        title: Title of its panel; "" for a metric without one.
        unit: Label of its axis.
    """

    metric: str
    kind: Kind
    title: str = ""
    unit: str = ""


# Dimensions rise, fall, and may rise again; ranks fall, rise, and may fall again.
WATCHED = (
    Watched("local_dimension", "trough", "Local dimension", "mean of TwoNN on 64 nearest rows"),
    Watched("twonn", "trough", "Intrinsic dimension", "TwoNN on all rows"),
    Watched("effective_rank", "peak", "Effective rank", "exp of the entropy of the spectrum"),
    Watched("effective_rank_last", "peak"),
)


@dataclass(frozen=True)
class Overfit(Experiment):
    """Does the local dimension turn before the held-out loss does, as a model overfits?

    A small decoder memorises a few texts. The control takes the same number of steps on plenty of
    text.
    """

    kinds = ("few", "plenty")
    # Six of six are beyond one half, five of five are not.
    default_seeds: ClassVar[int] = 6

    layers: Annotated[int, Option(min=1, help="Blocks of the model.")] = 3
    width: Annotated[int, Option(min=2, help="Width of the hidden states.")] = 64
    heads: Annotated[int, Option(min=1, help="Heads of each attention.")] = 4
    context: Annotated[int, Option(min=2, max=4096, help="Characters in a window.")] = 32
    batch: Annotated[int, Option(min=1, help="Windows in a batch.")] = 16
    steps: Annotated[int, Option(min=1, help="Optimizer updates.")] = 300
    few: Annotated[int, Option(min=2, help="Characters of the few texts.")] = 4096
    distance: Annotated[int, Option(min=1, help="Steps between two readings.")] = 20

    @property
    def characters(self) -> int:  # type: ignore[override]
        """Fewest characters of a text that the trainings need."""
        return max(200_000, 20 * (self.context + 1), 2 * self.few)

    @property
    def differs(self) -> str:
        """Describe how the trainings differ from the published ones."""
        return (
            "a small character model trained from nothing, whose local dimension first rises, in "
            "place of a pretrained one that is fine-tuned"
        )

    def check(self) -> None:
        """Check the options."""
        check_heads(self.width, self.heads)
        if self.few <= self.context:
            raise InputError(
                f"--few {self.few} holds no window of --context {self.context}: give more"
            )

    def training(self, kind: str, seed: int, corpus: Text | None) -> Training:
        """Build one training; torch's generator is already seeded."""
        assert corpus is not None
        length = self.context + 1
        model = Transformer(
            nn.Embedding(corpus.vocabulary, self.width),
            Architecture(
                self.layers, self.width, self.heads, self.context, alibi=True,
                deviation=0.02 * (768 / self.width) ** 0.5,
            ),
        )  # fmt: skip
        text = corpus.train[: self.few] if kind == "few" else corpus.train
        draw_windows = random_windows(text, length, self.batch)
        unused = torch.Generator()
        measured = {
            "train_loss": spread(text, length, _LOSS_WINDOWS),
            "held_out_loss": spread(corpus.validation, length, _LOSS_WINDOWS),
        }
        metrics = {
            **select("effective_rank", "effective_rank_last", "twonn"),
            "local_dimension": local_dimension,
        }
        probe = spread(corpus.validation, self.context, _SEQUENCES)
        return Training(
            model,
            lambda generator: next_characters(model, draw_windows(generator), generator),
            self.steps,
            {"": Watch(model, probe, metrics, _ROWS)},
            every(self.distance),
            learning_rate=2e-3,
            rate=warm_up(50),  # and no decay, which would turn curves too
            held_out=lambda: {
                name: next_characters(model, windows, unused) for name, windows in measured.items()
            },
        )

    def claims(self, runs: Runs) -> Iterable[Claim]:
        """Measure the claims of the paper."""
        few, plenty = (runs.of(kind) for kind in self.kinds)
        yield from answers(OF_FEW, few)
        yield from answers(OF_PLENTY, plenty)

    def figures(self, runs: Runs) -> Mapping[str, Figure]:
        """Draw the records."""
        return {"overfit": draw(*(runs.of(kind) for kind in self.kinds))}

    def table(self, runs: Runs) -> Iterable[str]:
        """Write the turns of each metric as rows of a Markdown table."""
        few, plenty = (runs.of(kind) for kind in self.kinds)
        rows: list[tuple[str, Kind, Callable[[History], int | None], list[float]]] = [
            ("held-out loss", "trough", loss_turn, []),
            *(
                (f"`{one.metric}`", one.kind, partial(geometry_turn, watched=one), leads(few, one))
                for one in WATCHED
            ),
        ]
        cells = []
        for name, kind, turn, lead in rows:
            at = ", ".join("never" if step is None else str(step) for step in map(turn, few))
            false = [step for step in map(turn, plenty) if step is not None]
            where = f" (at {', '.join(map(str, false))})" if false else ""
            mean = f"{estimate(lead).mean:.0f} ± {estimate(lead).margin:.0f}" if lead else "none"
            cells.append((name, kind, at, mean, f"{len(false)} of {len(plenty)}{where}"))
        return table(
            ["at the last layer", "turns at", "few texts: step",
             "lead over the held-out loss (steps)", "false alarms: turns on plenty of text"],
            cells, words=2,
        )  # fmt: skip


def last_layer(history: History, metric: str) -> list[float]:
    """List the values of a metric at the last layer, which the paper uses."""
    return history.values(tags.layer_tag(metric, max(history.last.layers(metric))))


def loss_turn(history: History) -> int | None:
    """Find the step where the held-out loss turns, or None if it does not."""
    index = first_turn(history.values(HELD_OUT), _SHARE_OF_LOSS, "trough")
    return None if index is None else history.steps[index]


def geometry_turn(history: History, watched: Watched) -> int | None:
    """Find the step where a metric turns at the last layer, or None if it does not."""
    values = last_layer(history, watched.metric)
    index = first_turn(values, _SHARE_OF_GEOMETRY, watched.kind, after_other=True)
    return None if index is None else history.steps[index]


def leads(few: Sequence[History], watched: Watched) -> list[float]:
    """Return the number of steps by which a metric turns before the held-out loss.

    Returns:
        Leads of the seeds with both turns, negative if the metric turns later.
    """
    pairs = [(loss_turn(each), geometry_turn(each, watched)) for each in few]
    return [float(loss - own) for loss, own in pairs if loss is not None and own is not None]


def rise_of_loss(history: History) -> float:
    """Return the final held-out loss minus its lowest value."""
    values = history.values(HELD_OUT)
    return values[-1] - min(values)


def _turns(history: History) -> bool:
    return geometry_turn(history, WATCHED[0]) is not None


_SHARE = "share of the seeds with a trough after the first peak"
_RISE = "rise of the held-out loss from its lowest value, in nats"
OF_FEW: list[Question] = [
    (Claim("local_dimension_turns",
           "Trained on few texts the local dimension of the last layer reaches a minimum and rises "
           "again.", _SOURCE, _SHARE, above=0.5, counted=True),
     _turns),
    (Claim("local_dimension_turns_before_the_loss",
           "The local dimension of the last layer turns before the held-out loss.", _SOURCE,
           "lead in steps", above=0),
     lambda history: leads([history], WATCHED[0])),
    (Claim("few_texts_overfit", "Trained on few texts the model overfits.", _SOURCE, _RISE,
           above=_OVERFITTED, ours=True),
     rise_of_loss),
]  # fmt: skip
OF_PLENTY: list[Question] = [
    (Claim("local_dimension_turns_with_overfitting_alone",
           "On plenty of text, without overfitting, it does not rise again.", _SOURCE, _SHARE,
           below=0.5, counted=True),
     _turns),
    (Claim("plenty_of_text_does_not_overfit",
           "In the same number of steps on plenty of text it does not: the control.", _SOURCE,
           _RISE, below=_OVERFITTED, ours=True),
     rise_of_loss),
]  # fmt: skip


def draw(few: Sequence[History], plenty: Sequence[History]) -> Figure:
    """Draw an experiment in four panels."""
    figure = Figure(figsize=(10.2, 7.0), dpi=90, layout="constrained")
    panels = figure.subplots(2, 2)
    losses, step = panels[0, 0], "training step"
    for seeds, colour, label in (
        (few, ORANGE, "few texts, many epochs"),
        (plenty, BLUE, "plenty of text: control"),
    ):
        steps = seeds[0].steps
        held_out, trained = ([each.values(tag) for each in seeds] for tag in (HELD_OUT, TRAIN))
        draw_seeds(losses, steps, held_out, colour=colour, label=label)
        draw_seeds(losses, steps, trained, colour=colour, lw=1.6, ls="--")
        for panel, watched in zip(panels.flat[1:], WATCHED[:3], strict=True):
            curves = [last_layer(each, watched.metric) for each in seeds]
            draw_seeds(panel, steps, curves, colour=colour, label=label)
            for each, curve in zip(seeds, curves, strict=True):
                if (turn := geometry_turn(each, watched)) is not None:
                    place = [turn], [curve[steps.index(turn)]]
                    panel.plot(*place, "o", ms=7, color=colour, mec="white")
    title = "Loss: held-out text solid, training text dashed"
    label_panel(losses, "a", title, step, "cross-entropy (nats per character)")
    for letter, panel, watched in zip("bcd", panels.flat[1:], WATCHED[:3], strict=True):
        label_panel(panel, letter, f"{watched.title}, last layer", step, watched.unit)
    for panel in panels.flat:
        panel.set_ylim(bottom=0)
        for turn in filter(None, map(loss_turn, few)):
            panel.axvline(turn, color=GREY, lw=1, ls=":", zorder=0)
    handles, labels = losses.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=10)
    note = (
        f"{explain_seeds(len(few))}; dots: where a seed turns; dotted: where the held-out loss of "
        "few texts does"
    )
    figure.supxlabel(note, fontsize=9, color=GREY)
    return figure


EXPERIMENT = Overfit
