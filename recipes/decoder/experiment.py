"""Test the claims of four papers on language models with a small decoder of characters."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from typer import Option

from geomon import METRICS, log_spaced
from geomon.kernels.token_types import token_types
from recipes.decoder.claims import (
    attention_questions,
    norm_questions,
    shape_questions,
    spectral_questions,
    stability_claims,
)
from recipes.decoder.figure import decoder_figure, seeds_figure
from recipes.enwik8.optimizer import cosine_rate
from recipes.enwik8.text import InputError, Text, spread
from recipes.study.claim import Claim, answers
from recipes.study.experiment import Experiment, Runs, check_heads
from recipes.study.model import Architecture, Transformer
from recipes.study.text import next_characters, random_windows
from recipes.study.training import Training, Watch, without_margins

# Metrics beyond the default ones.
_MORE = (
    "alpha_last", "effective_rank_last", "local_anisotropy", "cosine_centred", "mean_query_share",
    "query_cosine", "key_cosine",
)  # fmt: skip
# Windows on which the held-out loss is measured.
_LOSS_WINDOWS = 256


def norm_variance_slope_shuffled(hidden: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
    """Fit the slope of V_t on M_t over types to which the rows are assigned at random.

    The types keep their numbers of rows and nothing else, so that the slope is what arithmetic
    alone makes: V_t = Q_t - M_t.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].
    """
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(len(token_ids), generator=generator)
    fit = token_types(hidden, token_ids[order.to(token_ids.device)]).norm_variance_slope()
    return {"": fit.slope, "r_squared": fit.r_squared, "q_variation": fit.q_variation}


@dataclass(frozen=True)
class Decoder(Experiment):
    """Test the claims of four papers with a small decoder of characters.

    Each seed is the model of the recipe enwik8 (GPT-2's block), trained half as long.
    """

    kinds = ("decoder",)
    default_seeds: ClassVar[int] = 4
    characters: ClassVar[int] = 400_000

    layers: Annotated[int, Option(min=4, help="Blocks of the model.")] = 4
    width: Annotated[int, Option(min=8, help="Width of the hidden states.")] = 128
    heads: Annotated[int, Option(min=1, help="Heads of each attention.")] = 4
    context: Annotated[int, Option(min=2, max=4096, help="Characters in a window.")] = 64
    batch: Annotated[int, Option(min=1, help="Windows in a batch.")] = 32
    steps: Annotated[int, Option(min=8, help="Optimizer updates.")] = 750
    warmup: Annotated[
        int, Option(min=1, help="Updates until the learning rate is at its highest.")
    ] = 50
    # The spectrum of their last tokens needs twice the width.
    windows: Annotated[int, Option(min=64, help="Held-out windows that each reading looks at.")] = (
        256
    )
    rows: Annotated[int, Option(min=256, help="Rows that each reading measures.")] = 4096
    first: Annotated[int, Option(min=1, help="First step that is read after step 0.")] = 32

    @property
    def differs(self) -> str:
        """In which way the trainings differ in kind from the published ones."""
        return (
            f"characters, {self.layers} layers of width {self.width}, {self.steps:,} steps "
            "(theirs: pretrained models on subwords)"
        )

    def check(self) -> None:
        """Check the options."""
        check_heads(self.width, self.heads)
        if self.warmup >= self.steps:
            raise InputError(f"--warmup {self.warmup} leaves nothing of --steps {self.steps}")

    def training(self, kind: str, seed: int, corpus: Text | None) -> Training:
        """Build one training; torch's generator has the seed."""
        assert corpus is not None
        architecture = Architecture(self.layers, self.width, self.heads, self.context)
        embedding = nn.Embedding(corpus.vocabulary, self.width)
        model = Transformer(embedding, architecture)
        draw = random_windows(corpus.train, self.context + 1, self.batch)
        held_out = spread(corpus.validation, self.context + 1, _LOSS_WINDOWS)
        unused = torch.Generator()
        probe = spread(corpus.validation, self.context, self.windows)
        metrics: dict[str, Callable[..., Any]] = {
            **without_margins(*METRICS, *_MORE),
            "norm_variance_slope_shuffled": norm_variance_slope_shuffled,
        }
        return Training(
            model,
            lambda generator: next_characters(model, draw(generator), generator),
            self.steps,
            {"": Watch(model, probe, metrics, self.rows, ("final_norm",))},
            log_spaced(per_octave=2, first=self.first),
            learning_rate=2e-3,
            rate=cosine_rate(self.warmup, self.steps),
            held_out=lambda: {
                "bits_per_character": next_characters(model, held_out, unused) / math.log(2)
            },
        )

    def claims(self, runs: Runs) -> Iterable[Claim]:
        """Measure what papers assert.

        Quantities and limits were written down from the papers' words before any run had ended;
        those that no training could have brought out otherwise were taken out later.
        """
        seeds = runs.of("decoder")
        yield from answers(shape_questions(), seeds)
        yield from answers(attention_questions(self.width, self.width // self.heads), seeds)
        yield from stability_claims(seeds)
        yield from answers(norm_questions(), seeds)
        yield from answers(spectral_questions(self.warmup / self.steps), seeds)

    def figures(self, runs: Runs) -> Mapping[str, Figure]:
        """Draw the records."""
        seeds = runs.of("decoder")
        return {"decoder": decoder_figure(seeds), "decoder_seeds": seeds_figure(seeds)}


EXPERIMENT = Decoder
