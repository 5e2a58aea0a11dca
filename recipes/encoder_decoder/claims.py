"""What the records say of the published claims on encoders and decoders."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from geomon import Reading, Readings
from geomon.analysis.profile import bulge, peak_depth, profile_of
from geomon.record.columns import Column
from recipes.encoder_decoder.train import KINDS
from recipes.study import Claim, read_kinds, seconds_of_kinds

# A profile counts as flat whose highest and lowest layer differ by less than this share of its
# mean. Chosen before the first run of an encoder.
FLAT = 0.5
# Between these depths lies the middle half; the exact thirds would lie on layers of some models.
MIDDLE = (0.25, 0.75)

_SHAPE = "2311.05928, section 3.2 and figure 1"
_PICTURE = "docs/pictures/encoder_decoder.png"
_DIFFERS = (
    "Small character models of one architecture, trained for some hundred steps; the paper "
    "compares published subword models that differ in size, text, norms and positions too."
)

Runs = dict[str, list[Readings]]
Profile = list[float]


def load_runs(folder: Path) -> Runs:
    """Read the records of all kinds of models, one for each seed.

    Args:
        folder: Folder of the experiment.
    """
    return read_kinds(folder, KINDS)


def profile(reading: Reading, metric: str = "anisotropy") -> Profile:
    """Collect the anisotropy of each layer, first to last.

    Args:
        reading: Reading of one model.
        metric: Name of the metric.
    """
    return profile_of(reading, metric)


def normed_profile(reading: Reading) -> Profile:
    """Collect the anisotropy of each layer, the last one after the final norm.

    That is what transformers calls the last hidden state.

    Args:
        reading: Reading of one model.
    """
    layers = profile(reading)
    normed = reading.stacks.get("final_norm", {}).get("anisotropy", Column())
    return [*layers[:-1], normed.at(len(layers) - 1)]


def mean_after_input(layers: Profile) -> float:
    """Average a profile over the blocks' outputs, without what enters the first block.

    Args:
        layers: Value at each layer, first to last.
    """
    return statistics.fmean(layers[1:])


def relative_range(layers: Profile) -> float:
    """Compare highest and lowest layer: their difference as a share of the mean of all layers.

    Args:
        layers: Value at each layer, first to last.

    Example:
        >>> relative_range([0.25, 0.5, 0.75])
        1.0
    """
    return (max(layers) - min(layers)) / statistics.fmean(layers)


def deviations(profiles: Sequence[Profile]) -> list[float]:
    """Measure how far each profile lies from the mean of the others: mean distance over layers.

    Args:
        profiles: One profile for each seed, at least two.

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


def claims(folder: Path) -> list[Claim]:
    """Compare the records of an experiment with what was published.

    Args:
        folder: Folder of the experiment, with a folder for each seed.
    """
    runs = load_runs(folder)
    seconds = seconds_of_kinds(folder, KINDS)
    common: dict[str, Any] = {
        "command": "make encoder_decoder", "picture": _PICTURE, "differs": _DIFFERS,
        "seconds": seconds,
    }  # fmt: skip
    return [
        Claim(**common, **each)
        for each in (
            *_bell(runs), *_flat(runs), *_consistent(runs), *_level(runs), *_growth(runs),
            *_attention(runs),
        )
    ]  # fmt: skip


def table(folder: Path) -> list[str]:
    """Write what each kind of model is like at the end, as lines of a Markdown table.

    Args:
        folder: Folder of the experiment.
    """
    lines = [
        "| model | held-out loss (nats) | anisotropy untrained | anisotropy trained "
        "| bulge | depth of the peak | range / mean | cosine |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, seeds in load_runs(folder).items():
        ends = [readings[-1] for readings in seeds]
        columns: list[tuple[list[float], int]] = [
            ([end.training["held_out_loss"] for end in ends], 2),
            ([mean_after_input(profile(readings[0])) for readings in seeds], 3),
            ([mean_after_input(profile(end)) for end in ends], 3),
            ([bulge(profile(end)) for end in ends], 2),
            ([peak_depth(profile(end)) for end in ends], 2),
            ([relative_range(profile(end)) for end in ends], 2),
            ([mean_after_input(profile(end, "cosine")) for end in ends], 3),
        ]
        cells = [f"{statistics.fmean(values):.{digits}f}" for values, digits in columns]
        lines.append(f"| {' | '.join([f'`{name}`', *cells])} |")
    return lines


def _ends(seeds: Sequence[Readings], of: Callable[[Reading], float]) -> tuple[float, ...]:
    """A number of the last reading of each seed."""
    return tuple(of(readings[-1]) for readings in seeds)


def _difference(
    one: Sequence[Readings], other: Sequence[Readings], of: Callable[[Reading], float]
) -> tuple[float, ...]:
    """The same number of two kinds of models, subtracted seed by seed."""
    pairs = zip(_ends(one, of), _ends(other, of), strict=True)
    return tuple(first - second for first, second in pairs)


def _bell(runs: Runs) -> list[dict[str, Any]]:
    seeds, published = runs["decoder"], "a bell-shaped profile, highest in the middle layers"
    quantity = "bulge of the anisotropy over depth: (middle third - ends) / ends"
    return [
        {
            "name": "decoder_bell",
            "asserts": "The anisotropy of a decoder is higher in the middle layers than at both "
            "ends.",
            "published": published, "source": _SHAPE, "quantity": quantity, "above": 0.0,
            "values": _ends(seeds, lambda end: bulge(profile(end))),
        },
        {
            "name": "decoder_bell_after_final_norm",
            "asserts": "So it is where the last layer is taken after the final norm.",
            "published": published, "source": _SHAPE, "above": 0.0,
            "quantity": f"{quantity}, the last layer after the final norm",
            "values": _ends(seeds, lambda end: bulge(normed_profile(end))),
        },
        {
            "name": "decoder_bell_without_massive_rows",
            "asserts": "So it is without the few rows of massive norm.",
            "published": "a bell-shaped profile; rows of massive norm are not told apart",
            "source": _SHAPE, "quantity": f"{quantity}, without massive rows", "above": 0.0,
            "values": _ends(seeds, lambda end: bulge(profile(end, "anisotropy_no_sinks"))),
        },
        {
            "name": "decoder_peak_in_the_middle",
            "asserts": "The layer of highest anisotropy of a decoder lies in the middle half of "
            "the depth.",
            "published": published, "source": _SHAPE, "above": MIDDLE[0], "below": MIDDLE[1],
            "quantity": "depth of the highest anisotropy: 0 is the first block's input, 1 the last "
            "block's output",
            "values": _ends(seeds, lambda end: peak_depth(profile(end))),
        },
    ]  # fmt: skip


def _flat(runs: Runs) -> list[dict[str, Any]]:
    """Whether encoders are flat, with the input of the first block and without it."""
    found: list[dict[str, Any]] = []
    for ending, first, words in (("", 0, "over depth"), ("_over_blocks", 1, "over the blocks")):

        def of(end: Reading, first: int = first) -> float:
            return relative_range(profile(end)[first:])

        quantity = f"range of the anisotropy {words}, as a share of its mean"
        found += [
            {
                "name": f"encoder_flat{ending}",
                "asserts": f"The anisotropy of an encoder is uniform {words}.",
                "published": "a profile uniform over depth", "source": _SHAPE,
                "quantity": quantity, "below": FLAT, "values": _ends(runs["encoder"], of),
            },
            {
                "name": f"encoder_flatter_than_decoder{ending}",
                "asserts": f"The profile of an encoder {words} is flatter than that of a decoder.",
                "published": "encoders uniform, decoders bell-shaped", "source": _SHAPE,
                "quantity": f"{quantity}: decoder less encoder", "above": 0.0,
                "values": _difference(runs["decoder"], runs["encoder"], of),
            },
        ]  # fmt: skip
    return found


def _consistent(runs: Runs) -> list[dict[str, Any]]:
    profiles = {
        name: [profile(readings[-1]) for readings in runs[name]] for name in ("decoder", "encoder")
    }
    if len(profiles["encoder"]) < 2:
        return []
    pairs = zip(deviations(profiles["decoder"]), deviations(profiles["encoder"]), strict=True)
    return [
        {
            "name": "encoders_consistent",
            "asserts": "The profiles of encoders differ less from each other than those of "
            "decoders.",
            "published": "consistent across the encoders",
            "source": _SHAPE, "above": 0.0,
            "quantity": "mean distance over layers from the mean profile of the other seeds: "
            "decoder less encoder",
            "values": tuple(decoder - encoder for decoder, encoder in pairs),
        }
    ]  # fmt: skip


def _level(runs: Runs) -> list[dict[str, Any]]:
    return [
        {
            "name": "decoder_more_anisotropic",
            "asserts": "A decoder is more anisotropic than an encoder, on average over layers.",
            "published": "the curves of decoders lie above those of encoders",
            "source": "2311.05928, figure 1", "above": 0.0,
            "quantity": "mean anisotropy over layers: decoder less encoder",
            "values": _difference(
                runs["decoder"], runs["encoder"], lambda end: mean_after_input(profile(end))
            ),
        }
    ]  # fmt: skip


def _growth(runs: Runs) -> list[dict[str, Any]]:
    changes = [
        [after - before for before, after in zip(*map(profile, ends), strict=True)]
        for ends in ((readings[0], readings[-1]) for readings in runs["decoder"])
    ]
    published, source = "anisotropy grows with training", "2311.05928, section 4 and figure 3"
    return [
        {
            "name": "decoder_anisotropy_grows",
            "asserts": "Training makes a decoder more anisotropic, on average over layers.",
            "published": published, "source": source, "above": 0.0,
            "quantity": "mean anisotropy over layers: trained less untrained",
            "values": tuple(map(mean_after_input, changes)),
        },
        {
            "name": "decoder_anisotropy_grows_at_every_layer",
            "asserts": "Training makes every layer of a decoder more anisotropic.",
            "published": published, "source": source, "above": 0.0,
            "quantity": "anisotropy of the layer that gains least: trained less untrained",
            "values": tuple(map(min, changes)),
        },
    ]  # fmt: skip


def _attention(runs: Runs) -> list[dict[str, Any]]:
    decoder, uniform = runs["decoder"], runs["decoder_uniform"]
    return [
        {
            "name": "attention_makes_the_bell",
            "asserts": "With weights that depend on content the profile of a decoder bulges more "
            "than with uniform ones.",
            "published": "nothing; asked here, since the mask is there in both",
            "source": "no paper", "above": 0.0,
            "quantity": "bulge of the anisotropy over depth: attention less uniform weights",
            "values": _difference(decoder, uniform, lambda end: bulge(profile(end))),
        },
        {
            "name": "attention_raises_the_cosine",
            "asserts": "With weights that depend on content the rows of a decoder are more alike "
            "than with uniform ones.",
            "published": "anisotropy is inherent to self-attention",
            "source": "2401.12143, sections 4 and 5", "above": 0.0,
            "quantity": "mean cosine between tokens, over layers: attention less uniform weights",
            "values": _difference(
                decoder, uniform, lambda end: mean_after_input(profile(end, "cosine"))
            ),
        },
    ]  # fmt: skip
