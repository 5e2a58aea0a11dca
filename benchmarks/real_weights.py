"""Anisotropy and cosine over depth of three trained models of one domain, by `geomon.scan`.

    pip download --no-deps antiberty==0.1.3 iglm==0.1.0
    unzip -d weights antiberty-0.1.3-*.whl && unzip -d weights iglm-0.1.0-*.whl
    python -W ignore -m benchmarks.real_weights weights

The two packages carry an encoder and two decoders trained on antibody sequences, under academic
licences: they are neither installed nor copied here, and left out where they are absent. A text is
70 copies of one heavy chain, in which each letter is replaced at random with a given probability;
texts differ in that rate and in the seed. Intervals are those of the mean over texts, by Student's
t, for texts of this kind.
"""

import math
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from scipy import stats
from torch import Tensor

from geomon import Reading, scan, select
from geomon.analysis.profile import bulge, peak_depth, profile_of

CHAIN = (
    "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYY"
    "CAAPYCSSISCNDGFDIWGQGTMVTVS"
)
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
COPIES = 70
RATES = (0.1, 0.25, 0.5)
METRICS = select(
    "anisotropy", "anisotropy_no_sinks", "sink_share", "cosine", "drift_norm", "mean_square_norm"
)

# Folder of each model in its package, folder of its vocabulary, tokens before and after a chain.
MODELS = {
    "AntiBERTy (encoder)": (
        "antiberty/trained_models/AntiBERTy_md_smooth", ("[CLS]",), ("[SEP]",),
    ),
    "IgLM (decoder)": ("iglm/trained_models/IgLM", ("[HEAVY]", "[HUMAN]"), ()),
    "IgLM-S (decoder)": ("iglm/trained_models/IgLM-S", ("[HEAVY]", "[HUMAN]"), ()),
}  # fmt: skip


def chains(rate: float, seed: int) -> list[str]:
    """Copies of the chain in which each letter is replaced at random at a rate."""
    drawn = random.Random(f"{seed} {rate}")
    return [
        "".join(drawn.choice(LETTERS) if drawn.random() < rate else letter for letter in CHAIN)
        for _ in range(COPIES)
    ]


def as_tokens(
    texts: list[str], folder: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> Tensor:
    """Token ids of chains, [chains, tokens]; the vocabulary stands one folder up."""
    words = (folder.parent / "vocab.txt").read_text().split()
    ids = {word: number for number, word in enumerate(words)}
    return torch.tensor([[ids[word] for word in (*before, *text, *after)] for text in texts])


def readings_of(name: str, root: Path, seeds: int) -> dict[tuple[float, int], Reading]:
    """One reading for each text, by rate and seed."""
    place, before, after = MODELS[name]
    found = {}
    for rate in RATES:
        for seed in range(seeds):
            inputs = {"input_ids": as_tokens(chains(rate, seed), root / place, before, after)}
            with tempfile.TemporaryDirectory() as folder:
                readings = scan(root / place, inputs=inputs, directory=folder, metrics=METRICS)
                found[rate, seed] = readings[0]
    return found


def interval(values: list[float]) -> str:
    """Mean of values with the half width of its 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    width = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} +- {width:.3f}"


def show(name: str, found: dict[tuple[float, int], Reading]) -> None:
    """Print the profiles and their shapes."""
    print(f"\n{name}: {len(found)} texts")
    for metric in METRICS:
        profiles = [profile_of(reading, metric) for reading in found.values()]
        print(f"  {metric}: {'  '.join(interval(list(x)) for x in zip(*profiles, strict=True))}")
    shapes: list[tuple[str, Callable[[list[float]], float]]] = [
        ("bulge", bulge), ("depth of the peak", peak_depth),
    ]  # fmt: skip
    for metric in ("anisotropy", "anisotropy_no_sinks"):
        for label, shape in shapes:
            values = {text: shape(profile_of(r, metric)) for text, r in found.items()}
            by_rate = {x: [v for (rate, _), v in values.items() if rate == x] for x in RATES}
            each = ", ".join(f"{rate:.0%} {interval(own)}" for rate, own in by_rate.items())
            print(f"  {label} of {metric}: {interval(list(values.values()))} (by rate: {each})")


def show_fixed_points(name: str, folder: Path, drift: list[float]) -> None:
    """Print the common bias that a block gives back, beside the mean of its own inputs.

    Godey et al. (2401.12143, section 4) add a bias b = N u / |u| to the inputs x of an untrained
    block T. N* is the norm at which |E T(x + b)| = |E (x + b)|: below it a block lengthens the
    common part of its inputs, above it shortens it. Inputs are embeddings drawn uniformly from the
    table, 16 sequences of 128.
    """
    from transformers import BertConfig, BertModel

    trained = BertModel.from_pretrained(folder).eval()
    torch.manual_seed(0)
    untrained = BertModel(BertConfig.from_pretrained(folder)).eval()
    generator = torch.Generator().manual_seed(0)
    print(f"{name}: N* over 4 directions, beside the norm of the mean input on the texts")
    for label, model, blocks in (
        ("untrained block", untrained, [0]), ("trained", trained, range(len(drift) - 1)),
    ):  # fmt: skip
        table = model.embeddings.word_embeddings.weight.detach()
        rows = table[torch.randint(len(table), (16, 128), generator=generator)]
        for number in blocks:
            block = model.encoder.layer[number]
            points = [_fixed_point(block, rows, generator) for _ in range(4)]
            beside = f", drift_norm {drift[number]:.1f}" if model is trained else ""
            print(f"  {label} {number + 1}: N* {interval(points)}{beside}")


@torch.no_grad()
def _fixed_point(block: Any, rows: Tensor, generator: torch.Generator) -> float:
    direction = torch.randn(rows.shape[-1], generator=generator)
    direction = direction / direction.norm()

    def gain(size: float) -> float:
        inputs = rows + size * direction
        output = block(inputs)
        output = output[0] if isinstance(output, tuple) else output
        return float(output.mean(dim=(0, 1)).norm() - inputs.mean(dim=(0, 1)).norm())

    low, high = 0.0, 200.0
    if gain(low) <= 0:
        return 0.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def main(
    weights: Annotated[Path, typer.Argument(help="Folder with the unpacked packages.")],
    seeds: Annotated[int, typer.Option(help="Texts for each rate of replacement.")] = 4,
) -> None:
    """Scan the models that are there."""
    for name, (place, *_) in MODELS.items():
        if not (weights / place / "pytorch_model.bin").is_file():
            print(f"{name}: left out, no weights at {weights / place} (see the top of this file)")
            continue
        found = readings_of(name, weights, seeds)
        show(name, found)
        if "encoder" in name:
            profiles = [profile_of(reading, "drift_norm") for reading in found.values()]
            drift = [statistics.fmean(values) for values in zip(*profiles, strict=True)]
            show_fixed_points(name, weights / place, drift)


if __name__ == "__main__":
    typer.run(main)
