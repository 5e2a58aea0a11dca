"""A Transformer block with a common bias added to its input: the effect of drift on attention."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from typer import Option

from geomon import select
from recipes.bias_drift.assertions import Series, bias_claims
from recipes.bias_drift.figure import draw
from recipes.enwik8.text import InputError, Text
from recipes.study.claim import Claim
from recipes.study.experiment import Experiment, Runs
from recipes.study.model import Architecture, Transformer
from recipes.study.text import masked_characters, random_windows
from recipes.study.training import Training, Watch, warm_up

# Norms of the bias. An embedding has a norm of 0.55, a normalised row of width 768 one of 27.7.
LEVELS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 32.0, 128.0)
TRAINED_LEVELS = (0.0, 0.5, 2.0, 8.0, 32.0)
# Size of BERT's vocabulary, so that a sample holds few tokens twice.
_VOCABULARY = 30_522
_CONTEXT, _BATCH = 64, 16


def mean_norm(hidden: Tensor) -> Tensor:
    """Mean norm of a row, E |x|, whereas `drift_norm` is the norm of the mean row, |E x|."""
    return hidden.norm(dim=1).mean()


def query_norm(projected_query: Tensor) -> Tensor:
    """Mean norm of a query, per head."""
    return projected_query.norm(dim=2).mean(dim=0)


def key_norm(projected_key: Tensor) -> Tensor:
    """Mean norm of a key, per key head."""
    return projected_key.norm(dim=2).mean(dim=0)


METRICS: Mapping[str, Callable[..., Any]] = {
    **select(
        "cosine", "drift_norm", "query_cosine", "key_cosine", "query_anisotropy", "key_anisotropy",
        "attention_entropy_normalised", "attention_extremes", "score_mean", "score_spread",
    ),
    "mean_norm": mean_norm,
    "query_norm": query_norm,
    "key_norm": key_norm,
}  # fmt: skip


class Biased(nn.Module):
    """A model's block on token embeddings plus a constant vector.

    Args:
        model: Transformer with one block, whose modules are shared.
        bias: Vector that is added to every row, [width].
    """

    def __init__(self, model: Transformer, bias: Tensor) -> None:
        super().__init__()
        self.embedding, self.blocks = model.embedding, model.blocks
        self.bias = bias

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the output of the block, [sequences, length, width]."""
        return self.blocks[0](self.embedding(tokens) + self.bias)


@dataclass(frozen=True)
class BiasDrift(Experiment):
    """How does a common bias of its input change the attention of one block?

    A BERT block is read under biases of growing norm. Beyond the paper, so are a pre-norm block,
    and both blocks after training without bias to fill in masked characters.
    """

    kinds = ("post_norm", "pre_norm", "post_norm_trained", "pre_norm_trained")
    characters: ClassVar[int] = 200_000

    width: Annotated[int, Option(min=2, help="Width of the untrained block.")] = 768
    heads: Annotated[int, Option(min=1, help="Heads of the untrained block.")] = 12
    sequences: Annotated[int, Option(min=1, help="Sequences.")] = 8
    length: Annotated[int, Option(min=2, help="Tokens of a sequence.")] = 256
    directions: Annotated[int, Option(min=1, help="Directions of the bias.")] = 2
    trained_width: Annotated[int, Option(min=2, help="Width of the trained block.")] = 256
    steps: Annotated[int, Option(min=1, help="Steps of its training.")] = 200

    @property
    def differs(self) -> str:
        """Describe how the trainings differ from the published ones."""
        return (
            f"{self.sequences} sequences of {self.length} tokens (theirs: 16 of 512), a bias up to "
            f"{LEVELS[-1]:g}"
        )

    def check(self) -> None:
        """Check the options."""
        if self.width % self.heads or self.trained_width % (self.width // self.heads):
            raise InputError(
                f"--width {self.width} and --trained-width {self.trained_width} cannot both be "
                f"divided into heads as wide as those of --heads {self.heads}: choose heads that "
                "divide the first, and multiples of their width"
            )

    def training(self, kind: str, seed: int, corpus: Text | None) -> Training:
        """Build one training; torch's generator is already seeded."""
        assert corpus is not None
        trained = kind.endswith("_trained")
        width = self.trained_width if trained else self.width
        tokens = corpus.vocabulary if trained else _VOCABULARY
        model = Transformer(
            nn.Embedding(tokens + 1, width),  # one more for a masked character
            Architecture(
                1, width, width * self.heads // self.width, _CONTEXT, causal=False,
                norm="post" if kind.startswith("post") else "pre",
            ),
        )  # fmt: skip
        directions = torch.randn(1 if trained else self.directions, width)
        directions /= directions.norm(dim=1, keepdim=True)
        probe = torch.randint(tokens, (self.sequences, self.length))
        draw_windows = random_windows(corpus.train, _CONTEXT + 1, _BATCH)
        return Training(
            model,
            lambda generator: masked_characters(model, draw_windows(generator), generator),
            self.steps if trained else 0,
            {
                bias_folder(level, number): Watch(
                    Biased(model, level * direction), probe, METRICS, probe.numel()
                )
                for level in (TRAINED_LEVELS if trained else LEVELS)
                for number, direction in enumerate(directions if level else directions[:1])
            },
            lambda step: False,
            learning_rate=5e-4,
            rate=warm_up(20),
        )

    def claims(self, runs: Runs) -> Iterable[Claim]:
        """Measure the claims of section 4 on the paper's block and, as our own, on other blocks."""
        tokens, head_width = self.sequences * self.length, self.width // self.heads
        for kind in self.kinds:
            yield from bias_claims(kind, self._series(runs, kind), tokens, head_width)

    def figures(self, runs: Runs) -> Mapping[str, Figure]:
        """Draw the records."""
        series = {kind: self._series(runs, kind) for kind in self.kinds}
        return {"bias_drift": draw(series, self.length)}

    def _series(self, runs: Runs, kind: str) -> list[list[Series]]:
        """Collect the readings by level of the bias, for each seed and direction."""
        trained = kind.endswith("_trained")
        levels = TRAINED_LEVELS if trained else LEVELS
        found = [
            [runs.of(kind, bias_folder(level, number)) for level in levels]
            for number in range(1 if trained else self.directions)
        ]
        return [
            [Series(levels, [by_level[seed].last for by_level in direction]) for direction in found]
            for seed in range(len(found[0][0]))
        ]


def bias_folder(level: float, direction: int) -> str:
    """Name the folder for a level of bias; the level without bias has one for all directions.

    Example:
        >>> bias_folder(0.5, 1), bias_folder(0.0, 1)
        ('direction_1/bias_0.5', 'bias_0')
    """
    name = f"bias_{level:g}"
    return f"direction_{direction}/{name}" if level else name


EXPERIMENT = BiasDrift
