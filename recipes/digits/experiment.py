"""Tests which findings on text hold for images of digits (Godey et al., 2401.12143)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from typer import Option

from geomon import log_spaced, select
from geomon.analysis import profile_of
from geomon.kernels.baselines import isotropic_cosine_magnitude
from geomon.record import tags
from recipes.digits.data import CLASSES, load
from recipes.digits.figure import draw
from recipes.digits.model import PATCHES, ConvolutionalNetwork, OneVectorPerImage, Patches
from recipes.enwik8.text import InputError, Text
from recipes.study.claim import Claim, Question, answers
from recipes.study.experiment import Experiment, Runs
from recipes.study.history import (
    History,
    drift_and_cosine,
    gain,
    growth,
    over_heads,
    over_layers,
)
from recipes.study.model import Architecture, Transformer
from recipes.study.training import Training, Watch

# Further readings with one row per image instead of one per place.
PER_IMAGE = "per_image"
_ROWS = 4096
_SIGNIFICANT = 0.05
_PAPER = "2401.12143"


@dataclass(frozen=True)
class Digits(Experiment):
    """Do findings on text and on large vision models hold for small networks on digits?

    A vision transformer, an MLP-mixer and a convolutional network of the same depth are compared.
    """

    kinds = ("transformer", "mixer", "convolutional")
    default_seeds: ClassVar[int] = 3

    steps: Annotated[int, Option(min=2, help="Updates of a training.")] = 300
    batch: Annotated[int, Option(min=2, help="Images in a batch.")] = 64
    layers: Annotated[int, Option(min=3, help="Blocks of each network.")] = 6
    width: Annotated[int, Option(min=2, help="Width; maps have half as many channels.")] = 64
    heads: Annotated[int, Option(min=1, help="Heads of an attention.")] = 4

    @property
    def differs(self) -> str:
        """Describe how the trainings differ from the published ones."""
        return (
            f"{self.layers} blocks of width {self.width}, {self.steps} updates on 1,437 images of "
            "8 x 8 pixels (theirs: large models on ImageNet)"
        )

    def check(self) -> None:
        """Check the options."""
        if self.width % (2 * self.heads):
            raise InputError(
                f"--width {self.width} cannot be shared among --heads {self.heads}: choose a "
                f"multiple of {2 * self.heads}"
            )

    def training(self, kind: str, seed: int, corpus: Text | None) -> Training:
        """Build one training; torch's generator is already seeded."""
        images, held_out = load(seed)
        metrics = select("cosine", "cosine_centred", "drift_norm")
        model: nn.Module
        if kind == "convolutional":
            model = ConvolutionalNetwork(self.layers, self.width // 2)
            flat = OneVectorPerImage(model)
            more = {PER_IMAGE: Watch(flat, held_out.pixels, metrics, len(held_out.digits))}
        else:
            model = Transformer(
                Patches(self.width),
                Architecture(
                    self.layers, self.width, self.heads, PATCHES, causal=False,
                    mixing="perceptron" if kind == "mixer" else "attention", deviation=None,
                ),
                CLASSES,
            )  # fmt: skip
            more = {}
        attention = select("qk_cosine", "attention_entropy") if kind == "transformer" else {}

        def loss(generator: torch.Generator) -> Tensor:
            chosen = torch.randint(len(images.digits), (self.batch,), generator=generator)
            logits = model(images.pixels[chosen]).mean(dim=1)
            return F.cross_entropy(logits, images.digits[chosen])

        def accuracy() -> dict[str, Tensor]:
            model.eval()
            hits = model(held_out.pixels).mean(dim=1).argmax(dim=1) == held_out.digits
            model.train()
            return {"held_out_accuracy": hits.float().mean()}

        return Training(
            model,
            loss,
            self.steps,
            {"": Watch(model, held_out.pixels, {**metrics, **attention}, _ROWS), **more},
            log_spaced(per_octave=1, first=4),
            learning_rate=1e-3,
            weight_decay=0.01,
            held_out=accuracy,
        )

    def claims(self, runs: Runs) -> Iterable[Claim]:
        """Measure the paper's claims; it shows nothing on queries and keys of images."""
        networks = _networks(runs)
        for name, questions in anisotropy_questions().items():
            yield from answers(questions, networks[name])
        head_width = self.width // self.heads
        yield from answers(attention_questions(head_width), networks["transformer"])

    def figures(self, runs: Runs) -> Mapping[str, Figure]:
        """Draw the records."""
        return {"digits": draw(_networks(runs), self.width // self.heads)}

    def table(self, runs: Runs) -> Iterable[str]:
        """Write the accuracy and the mean cosine by layer of each network."""
        for kind, seeds in _networks(runs).items():
            tag = tags.training_tag("held_out_accuracy")
            accuracy = fmean(seed.last.values[tag] for seed in seeds)
            layers = zip(*(profile_of(seed.last, "cosine") for seed in seeds), strict=True)
            cosines = " ".join(f"{fmean(values):.2f}" for values in layers)
            yield f"{kind}: accuracy {accuracy:.1%}; mean cosine by layer {cosines}"


def _networks(runs: Runs) -> dict[str, list[History]]:
    found = {kind: runs.of(kind) for kind in Digits.kinds}
    return {**found, PER_IMAGE: runs.of("convolutional", PER_IMAGE)}


def largest_over_bar(history: History) -> float:
    """Return the largest mean cosine over layers, relative to the paper's threshold for chance.

    The threshold is the 95th percentile of the cosine of two isotropic rows (appendix B).
    """
    return max(profile_of(history.last, "cosine")) / history.last.values["cosine/isotropic_pair"]


def anisotropy_questions() -> dict[str, list[Question]]:
    """List what the paper asserts of cosine and drift, by the network that is asked."""
    bar = "largest mean cosine over the bar of appendix B"
    p_value = "exact p, Spearman"

    def drift(history: History) -> float:
        return drift_and_cosine(history.last, "spearman").p_value

    return {
        "transformer": [
            (Claim("vision_transformer_isotropic",
                   "ViT has a low mean cosine at all layers.", f"{_PAPER}, 3.2, fig. 3b", bar,
                   below=1.0, chosen="limit"),
             largest_over_bar),
            (Claim("vision_transformer_drift_explains_cosine",
                   "In vision transformers drift and cosine correlate over layers.",
                   f"{_PAPER}, 3.3, fig. 5", p_value, below=_SIGNIFICANT),
             drift),
        ],
        PER_IMAGE: [
            (Claim("convolutional_network_isotropic",
                   "A convolutional network is isotropic at every layer (most but ResNet-50).",
                   f"{_PAPER}, 3.2, fig. 4", bar, below=1.0),
             largest_over_bar),
            (Claim("convolutional_isotropy_grows_with_depth",
                   "Its deeper layers are more isotropic (ResNet-50).", f"{_PAPER}, 3.2, fig. 4",
                   "mean cosine, last layer less first", below=0),
             lambda h: profile_of(h.last, "cosine")[-1] - profile_of(h.last, "cosine")[0]),
            (Claim("convolutional_drift_does_not_explain_cosine",
                   "In convolutional networks they do not (most).",
                   f"{_PAPER}, 3.3, fig. 5", p_value, above=_SIGNIFICANT),
             drift),
        ],
        "convolutional": [
            (Claim("convolutional_places_isotropic",
                   "A convolutional network is isotropic at every layer, a row for each place.",
                   f"{_PAPER}, 3.2, fig. 4", bar, below=1.0, ours=True),
             largest_over_bar),
        ],
        "mixer": [
            (Claim("mixer_isotropic",
                   "A network without attention (MLP-mixer) is isotropic at every layer.",
                   f"{_PAPER}, title", bar, below=1.0, ours=True),
             largest_over_bar),
        ],
    }  # fmt: skip


def attention_questions(head_width: int) -> list[Question]:
    """List what the paper asserts of attention on text, asked of a vision transformer."""
    chance = isotropic_cosine_magnitude(head_width)
    size = partial(over_heads, metric="qk_cosine", size=True)

    def ask(name: str, asserts: str, figure: int, quantity: str, **limits: float) -> Claim:
        source = f"{_PAPER}, 5, fig. {figure}"
        return Claim(f"vision_{name}", asserts, source, quantity, ours=True, **limits)  # type: ignore[arg-type]

    return [
        (ask("mean_query_and_key_align",
             "Mean queries and keys align.", 13,
             "size of their cosine over chance", above=1),
         lambda h: size(h.last) / chance),
        (ask("alignment_grows",
             "Their alignment grows along training.", 13,
             "end less start", above=0),
         gain(size)),
        (ask("entropy_decays_at_every_layer",
             "The entropy of attention decays at every layer.", 15,
             "largest change over layers", below=0),
         lambda h: max(growth(h, "attention_entropy"))),
        (ask("first_layers_sharper",
             "Attention stays sharper in the first layers than in the last.", 15,
             "first two layers less last two", below=0),
         lambda h: over_layers(
             h.last, "attention_entropy", lambda values: fmean(values[:2]) - fmean(values[-2:]))),
    ]  # fmt: skip


EXPERIMENT = Digits
