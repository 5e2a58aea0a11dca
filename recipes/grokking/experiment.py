"""Modular arithmetic that is memorised first and understood later, and how geometry foresees it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from typer import Option

from geomon import every
from geomon.record import training_tag
from recipes.enwik8.text import Text
from recipes.grokking.data import LENGTH, Pairs, split, table, vocabulary_size
from recipes.grokking.figure import draw
from recipes.grokking.leads import (
    CURVES,
    HELD_OUT_ACCURACY,
    MARGINS,
    TRAINING_ACCURACY,
    fall,
    false_alarms,
    generalised,
    leads,
)
from recipes.study.claim import Claim, answers
from recipes.study.experiment import Experiment, Runs
from recipes.study.history import History
from recipes.study.model import Architecture, Transformer
from recipes.study.seeds import estimate_share
from recipes.study.training import Training, Watch, warm_up, without_margins

METRICS = without_margins("effective_rank_last", "local_dimension")

# A training ends at this accuracy on held-out pairs.
_SOLVED = 0.99
# A fall is a loss of a tenth.
_FALLEN = 0.9
_SOURCE = "2506.01034, abstract"


@dataclass(frozen=True)
class Grokking(Experiment):
    """Does geometry foretell that a model generalises?

    Trainings on subtraction modulo a number run until they answer held-out pairs. Controls have too
    few pairs and never generalise.
    """

    kinds = ("generalises", "control")
    default_seeds: ClassVar[int] = 3

    modulus: Annotated[int, Option(min=5, help="Number that the remainders are of.")] = 59
    steps: Annotated[int, Option(min=1, help="Most updates of a training.")] = 3500
    interval: Annotated[int, Option(min=1, help="Steps from a reading to the next.")] = 100
    batch: Annotated[int, Option(min=1, help="Pairs in a batch.")] = 128
    weight_decay: Annotated[float, Option(min=0, help="Weight decay of AdamW.")] = 1.0
    fraction: Annotated[
        float, Option(min=0.01, max=0.99, help="Share of the pairs to train on.")
    ] = 0.5
    control_fraction: Annotated[
        float, Option(min=0.01, max=0.99, help="The same for runs that are not to generalise.")
    ] = 0.15
    controls: Annotated[
        int, Option(min=0, help="Trainings that are not to generalise; 0 for as many as --seeds.")
    ] = 9

    @property
    def differs(self) -> str:
        """Describe how the trainings differ from the published ones."""
        return (
            f"modulus {self.modulus}, batch {self.batch}, weight decay {self.weight_decay:g} and "
            f"train fraction {self.fraction:g} (published: 97, 512, 0.01 and 0.1 to 0.5)"
        )

    def seeds_of(self, kind: str, seeds: int) -> int:
        """Return the number of trainings of a kind."""
        return self.controls or seeds if kind == "control" else seeds

    def training(self, kind: str, seed: int, corpus: Text | None) -> Training:
        """Build one training; torch's generator is already seeded."""
        share = self.control_fraction if kind == "control" else self.fraction
        train, held_out = split(table(self.modulus), share, seed)
        model = Transformer(
            nn.Embedding(vocabulary_size(self.modulus), 128),
            Architecture(2, 128, 4, LENGTH, deviation=None),
            self.modulus,
        )

        def loss(generator: torch.Generator) -> Tensor:
            chosen = torch.randint(len(train.answers), (self.batch,), generator=generator)
            return F.cross_entropy(model(train.tokens[chosen])[:, -1], train.answers[chosen])

        def accuracy(pairs: Pairs) -> Tensor:
            hits = model(pairs.tokens)[:, -1].argmax(dim=1) == pairs.answers
            return hits.float().mean()

        # The largest power of two within the control's pairs, for all: ranks depend on the number.
        probed = 1 << max(0, int(math.log2(self.control_fraction * self.modulus**2)))
        probe = train.tokens[:probed]
        return Training(
            model,
            loss,
            self.steps,
            {"": Watch(model, probe, METRICS, probed * LENGTH)},
            every(self.interval),
            learning_rate=1e-3,
            rate=warm_up(10),  # as Power et al. (2201.02177)
            weight_decay=self.weight_decay,
            decay_of_vectors=self.weight_decay,
            betas=(0.9, 0.98),
            held_out=lambda: {
                TRAINING_ACCURACY: accuracy(train), HELD_OUT_ACCURACY: accuracy(held_out)
            },
            is_solved=lambda values: bool(values[HELD_OUT_ACCURACY] >= _SOLVED),
        )  # fmt: skip

    def claims(self, runs: Runs) -> Iterable[Claim]:
        """Measure the claims; rank, rule and controls are ours."""
        for name, words in CURVES.items():
            yield from curve_claims(name, words, *map(runs.of, self.kinds))

    def figures(self, runs: Runs) -> Mapping[str, Figure]:
        """Draw the records."""
        solving, controls = map(runs.of, self.kinds)
        return {"grokking": draw(solving, controls, self.fraction, self.control_fraction)}

    def table(self, runs: Runs) -> Iterable[str]:
        """Write the steps of generalisation, and the result of the rule at each margin."""
        solving, controls = map(runs.of, self.kinds)
        yield f"half of the held-out pairs are answered at steps {[*map(generalised, solving)]}"
        best = max(max(run.values(training_tag(HELD_OUT_ACCURACY))) for run in controls)
        yield f"the controls answer {best:.1%} at most"
        for name in CURVES:
            for margin in MARGINS:
                line = f"  {name} {margin:4.0%} below the controls: leads"
                line += f" {leads(solving, controls, name, margin)}"
                if len(controls) > 1:
                    alarms = false_alarms(controls, name, margin)
                    wrong = estimate_share(alarms)
                    line += f"; false alarms in {sum(alarms)} of {len(alarms)} controls "
                    line += f"({wrong.low:.2f} to {wrong.high:.2f})"
                yield line


def curve_claims(
    name: str, words: str, runs: Sequence[History], controls: Sequence[History]
) -> Iterable[Claim]:
    """Measure the claims on one curve; what warnings are worth stands in the table."""
    is_ours = name != "local_dimension"
    falls = Claim(
        f"{name}_falls_before_generalisation", f"The {words} falls before generalisation.",
        _SOURCE, "value as a tenth of the held-out pairs is answered, over the highest before",
        below=_FALLEN, ours=is_ours, chosen="" if is_ours else "limit",
    )  # fmt: skip
    stays = Claim(
        f"{name}_stays_without_generalisation",
        f"The {words} does not fall without generalisation.", _SOURCE,
        "end of the control over the highest", above=_FALLEN, ours=True,
    )  # fmt: skip
    solved = [run for run in runs if generalised(run) is not None]
    yield from answers([(falls, lambda run: fall(run, name))], solved)
    yield from answers([(stays, lambda run: fall(run, name))], controls)


EXPERIMENT = Grokking
