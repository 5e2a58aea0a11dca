"""Anisotropy over depth: one transformer with and without the causal mask and attention."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from matplotlib.figure import Figure
from torch import nn
from typer import Option

from geomon import log_spaced, select
from geomon.analysis import bulge, peak_depth, profile_of
from recipes.encoder_decoder.figure import draw
from recipes.enwik8.optimizer import cosine_rate
from recipes.enwik8.text import Text, spread
from recipes.study.claim import Claim, Question, answers
from recipes.study.experiment import Experiment, Runs, check_heads
from recipes.study.history import History, hidden_states, over_layers
from recipes.study.markdown import table
from recipes.study.model import Architecture, Transformer
from recipes.study.text import masked_characters, next_characters, random_windows
from recipes.study.training import Training, Watch

# A profile counts as flat if its highest and lowest layer differ by less than this share of its
# mean. The value was chosen before the first run of an encoder.
FLAT = 0.5
# Ends of the middle half; exact thirds would coincide with layers of some models.
MIDDLE = (0.25, 0.75)
# The paper's least batch of rows; all characters of the probe are measured.
PROBE_CHARACTERS = 4096

_SHAPE = "2311.05928, 4.1, fig. 1"


@dataclass(frozen=True)
class EncoderDecoder(Experiment):
    """Is the anisotropy of a decoder a bell over depth, and the anisotropy of an encoder flat?

    Decoders and encoders differ only in the mask and its consequences. A third model has the mask
    but attends uniformly.
    """

    kinds = ("decoder", "encoder", "decoder_uniform")
    default_seeds: ClassVar[int] = 6
    characters: ClassVar[int] = 200_000

    layers: Annotated[int, Option(min=3, help="Blocks of each model.")] = 6
    width: Annotated[int, Option(min=2, help="Width of the hidden states.")] = 48
    heads: Annotated[int, Option(min=1, help="Heads of each attention.")] = 4
    context: Annotated[int, Option(min=2, max=4096, help="Characters in a window.")] = 32
    batch: Annotated[int, Option(min=1, help="Windows in a batch.")] = 16
    steps: Annotated[int, Option(min=1, help="Optimizer updates.")] = 400

    @property
    def differs(self) -> str:
        """Describe how the trainings differ from the published ones."""
        return (
            f"characters, one architecture, {self.layers} layers of width {self.width}, "
            f"{self.steps:,} steps (theirs: published models that differ in more)"
        )

    def check(self) -> None:
        """Check the options."""
        check_heads(self.width, self.heads)

    def training(self, kind: str, seed: int, corpus: Text | None) -> Training:
        """Build one training; torch's generator is already seeded."""
        assert corpus is not None
        uniform = kind == "decoder_uniform"
        architecture = Architecture(
            self.layers, self.width, self.heads, self.context, causal=kind != "encoder",
            mixing="uniform" if uniform else "attention", alibi=not uniform,
            deviation=0.02 * (768 / self.width) ** 0.5,  # GPT-2's at its width
        )  # fmt: skip
        # One id more than characters stands for a masked one.
        model = Transformer(nn.Embedding(corpus.vocabulary + 1, self.width), architecture)
        objective = next_characters if architecture.causal else masked_characters
        draw_windows = random_windows(corpus.train, self.context + 1, self.batch)
        held_out = spread(
            corpus.validation, self.context + 1, max(1, PROBE_CHARACTERS // self.context)
        )
        metrics = select("anisotropy", "cosine")
        return Training(
            model,
            lambda generator: objective(model, draw_windows(generator), generator),
            self.steps,
            {"": Watch(model, held_out[:, :-1], metrics, PROBE_CHARACTERS, ("final_norm",))},
            log_spaced(per_octave=2, first=16),
            learning_rate=3e-3,
            rate=cosine_rate(50, self.steps),
            held_out=lambda: {  # with the same masks at every reading
                "held_out_loss": objective(model, held_out, torch.Generator().manual_seed(0))
            },
        )

    def claims(self, runs: Runs) -> Iterable[Claim]:
        """Measure the claims of the papers."""
        seeds = {kind: runs.of(kind) for kind in self.kinds}
        together = [
            dict(zip(seeds, each, strict=True)) for each in zip(*seeds.values(), strict=True)
        ]
        yield from answers(questions(), together)
        profiles = [[_profile(each) for each in seeds[kind]] for kind in ("decoder", "encoder")]
        pairs = zip(*map(deviations, profiles), strict=True) if len(together) > 1 else ()
        yield Claim(
            "encoders_consistent", "Encoders differ less from each other than decoders.", _SHAPE,
            "mean distance from the other seeds' profile: decoder less encoder",
            tuple(one - other for one, other in pairs), above=0, ours=True,
        )  # fmt: skip

    def figures(self, runs: Runs) -> Mapping[str, Figure]:
        """Draw the records."""
        return {"encoder_decoder": draw({kind: runs.of(kind) for kind in self.kinds})}

    def table(self, runs: Runs) -> Iterable[str]:
        """Summarise the trained models of each kind as rows of a Markdown table."""
        columns: dict[str, tuple[Callable[[History], float], int]] = {
            "held-out loss (nats)": (lambda h: h.last.training["held_out_loss"], 2),
            "anisotropy untrained": (lambda h: over_layers(h.first, "anisotropy"), 3),
            "anisotropy trained": (lambda h: over_layers(h.last, "anisotropy"), 3),
            "bulge": (lambda h: bulge(_profile(h)), 2),
            "depth of the peak": (lambda h: peak_depth(_profile(h)), 2),
            "range / mean": (_range, 2),
            "cosine": (lambda h: over_layers(h.last, "cosine"), 3),
        }
        rows = [
            [f"`{kind}`", *(f"{statistics.fmean(map(measure, runs.of(kind))):.{digits}f}"
                            for measure, digits in columns.values())]
            for kind in self.kinds
        ]  # fmt: skip
        return table(["model", *columns], rows)


def relative_range(layers: Sequence[float]) -> float:
    """Return the difference between the highest and the lowest layer, divided by the mean of all.

    Example:
        >>> relative_range([0.25, 0.5, 0.75])
        1.0
    """
    return (max(layers) - min(layers)) / statistics.fmean(layers)


def deviations(profiles: Sequence[Sequence[float]]) -> list[float]:
    """Return each profile's distance from the mean of the others, averaged over layers.

    Example:
        >>> deviations([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
        [0.75, 0.0, 0.75]
    """
    found = []
    for own, layers in enumerate(profiles):
        others = [each for other, each in enumerate(profiles) if other != own]
        means = map(statistics.fmean, zip(*others, strict=True))
        distances = [abs(value - mean) for value, mean in zip(layers, means, strict=True)]
        found.append(statistics.fmean(distances))
    return found


Kinds = Mapping[str, History]  # what was recorded of a seed, by the kind of model


def questions() -> list[Question]:
    """List what the paper asserts of profiles over hidden states; before the final norm is ours.

    Flatness over the blocks alone was asked by us, after the first look at an encoder.
    """
    bulges, peak = "bulge: (middle third - ends) / ends", "depth of the peak, 0 to 1"
    decoder: list[Question] = [
        question
        for before, profile, words in (
            (False, _profile, ""), (True, _plain, "before the final norm")
        )
        for question in (
            (Claim(f"decoder_bell{'_before_norm' * before}",
                   "A decoder's anisotropy is higher in the middle layers than at the ends.",
                   _SHAPE, bulges, above=0, variant=words, ours=before,
                   chosen="formula" * (not before)),
             lambda kinds, profile=profile: bulge(profile(kinds["decoder"]))),
            (Claim(f"decoder_peak_in_the_middle{'_before_norm' * before}",
                   "It is highest in the middle layers.", _SHAPE, peak, above=MIDDLE[0],
                   below=MIDDLE[1], variant=words, ours=before, chosen="limits" * (not before)),
             lambda kinds, profile=profile: peak_depth(profile(kinds["decoder"]))),
        )
    ]  # fmt: skip
    flat: list[Question] = [
        question
        for ending, measure, words in (
            ("", _range, "over depth"), ("_over_blocks", _range_of_blocks, "over the blocks")
        )
        for question in (
            (Claim(f"encoder_flat{ending}", f"An encoder's anisotropy is uniform {words}.",
                   _SHAPE, "range / mean", below=FLAT, ours=bool(ending),
                   chosen="limit" * (not ending)),
             lambda kinds, measure=measure: measure(kinds["encoder"])),
            (Claim(f"encoder_flatter_than_decoder{ending}",
                   f"An encoder is more uniform {words} than a decoder.",
                   _SHAPE, "decoder less encoder", above=0, ours=bool(ending)),
             _less("decoder", "encoder", measure)),
        )
    ]  # fmt: skip
    others = [
        (Claim("decoder_more_anisotropic", "A decoder is more anisotropic than an encoder.",
               _SHAPE, "decoder less encoder", above=0, ours=True),
         _less("decoder", "encoder", lambda h: over_layers(h.last, "anisotropy"))),
        (Claim("attention_makes_the_bell",
               "Attention by content makes the bulge larger.", _SHAPE, "less uniform weights",
               above=0, ours=True),
         _less("decoder", "decoder_uniform", lambda h: bulge(_plain(h)))),
    ]  # fmt: skip
    return [*decoder, *flat, *others]


def _less(
    one: str, other: str, measure: Callable[[History], float]
) -> Callable[[Kinds], float]:  # fmt: skip
    """Return a function that subtracts a measure of `other` from that measure of `one`."""
    return lambda kinds: measure(kinds[one]) - measure(kinds[other])


def _profile(history: History) -> list[float]:
    return hidden_states(history.last, "anisotropy")


def _plain(history: History) -> list[float]:
    return profile_of(history.last, "anisotropy")


def _range(history: History) -> float:
    return relative_range(_profile(history))


def _range_of_blocks(history: History) -> float:
    return relative_range(_plain(history)[1:])


EXPERIMENT = EncoderDecoder
