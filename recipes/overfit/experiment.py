"""Few texts and many epochs: compares when the geometry and when the held-out loss turns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn
from typer import Option

from geomon import every
from geomon.record import tags
from recipes.enwik8.text import InputError, Text, spread
from recipes.overfit.turns import Kind, first_turn
from recipes.study.claim import Claim, Question, answers
from recipes.study.drawing import BLUE, GREY, ORANGE, Line, Panel, draw_panels, explain_seeds
from recipes.study.experiment import Experiment, Runs, check_heads
from recipes.study.history import History
from recipes.study.markdown import table
from recipes.study.model import Architecture, Transformer
from recipes.study.seeds import estimate
from recipes.study.text import next_characters, random_windows
from recipes.study.training import Training, Watch, warm_up, without_margins

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
            "a small model trained from nothing, whose local dimension first rises (theirs: a "
            "pretrained one, fine-tuned)"
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
        metrics = without_margins(*(watched.metric for watched in WATCHED))
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
    """Find the step at which the held-out loss turns, or None if it does not."""
    index = first_turn(history.values(HELD_OUT), _SHARE_OF_LOSS, "trough")
    return None if index is None else history.steps[index]


def geometry_turn(history: History, watched: Watched) -> int | None:
    """Find the step at which a metric turns at the last layer, or None if it does not."""
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


_SHARE = "share of seeds with a trough after the first peak"
_RISE = "rise of the held-out loss from its lowest value"
OF_FEW: list[Question] = [
    (Claim("local_dimension_turns",
           "On few texts the local dimension reaches a minimum and rises again.",
           _SOURCE, _SHARE, above=0.5, counted=True, ours=True),
     _turns),
    (Claim("local_dimension_turns_before_the_loss",
           "The mean local dimension predicts overfitting.", _SOURCE,
           "steps from its turn to that of the held-out loss", above=0,
           chosen="turns"),
     lambda history: leads([history], WATCHED[0])),
    (Claim("few_texts_overfit", "On few texts the model overfits.", _SOURCE, _RISE,
           above=_OVERFITTED, ours=True),
     rise_of_loss),
]  # fmt: skip
OF_PLENTY: list[Question] = [
    (Claim("local_dimension_turns_with_overfitting_alone",
           "On plenty of text it does not.", _SOURCE, _SHARE,
           below=0.5, counted=True, ours=True),
     _turns),
    (Claim("plenty_of_text_does_not_overfit",
           "On plenty of text it does not overfit.", _SOURCE,
           _RISE, below=_OVERFITTED, ours=True),
     rise_of_loss),
]  # fmt: skip


def draw(few: Sequence[History], plenty: Sequence[History]) -> Figure:
    """Draw an experiment in four panels; dotted: the turn of the held-out loss of few texts."""
    groups = ((few, ORANGE, "few texts, many epochs"), (plenty, BLUE, "plenty of text: control"))
    losses = [
        Line(f"{words}, {kind}", colour, seeds[0].steps, [one.values(tag) for one in seeds], style)
        for seeds, colour, words in groups
        for kind, tag, style in (
            ("held out", HELD_OUT, {}), ("trained on", TRAIN, {"lw": 1.6, "ls": "--"})
        )
    ]  # fmt: skip

    def mark(axes: Axes, watched: Watched | None) -> None:
        for turn in filter(None, map(loss_turn, few)):
            axes.axvline(turn, color=GREY, lw=1, ls=":", zorder=0)
        for seeds, colour, _ in groups if watched else ():
            for each in seeds:
                if watched and (step := geometry_turn(each, watched)) is not None:
                    value = last_layer(each, watched.metric)[each.steps.index(step)]
                    axes.plot(step, value, "o", ms=7, color=colour, mec="white")

    return draw_panels([
        Panel("Loss", "training step", "cross-entropy (nats per character)", losses,
              finish=partial(mark, watched=None)),
        *(Panel(f"{watched.title}, last layer (dots: where a seed turns)", "training step",
                watched.unit,
                [Line(words, colour, seeds[0].steps,
                      [last_layer(each, watched.metric) for each in seeds])
                 for seeds, colour, words in groups],
                finish=partial(mark, watched=watched), options={"ylim": (0, None)}, legend=None)
          for watched in WATCHED[:3]),
    ], 2, (10.2, 7.0), explain_seeds(len(few)))  # fmt: skip


EXPERIMENT = Overfit
