"""Anisotropy and intrinsic dimension (Razzhigaev et al., 2311.05928)."""

from collections.abc import Iterator, Sequence
from functools import partial

from recipes.study.claim import Claim, over_seeds
from recipes.study.history import QUARTER, History, growth, over_layers


def shape_claims(seeds: Sequence[History]) -> Iterator[Claim]:
    """Measure the claims of this paper.

    Args:
        seeds: What was recorded of each seed.
    """
    yield from _anisotropy(seeds)
    yield from _dimension(seeds)
    yield from _local_isotropy(seeds)


def _anisotropy(seeds: Sequence[History]) -> Iterator[Claim]:
    ask = partial(Claim, source="2311.05928, section 4.2, fig. 3, 4")
    yield ask(
        "anisotropy_grows",
        "The anisotropy of decoders grows during training.",
        quantity="end minus step 0, mean over layers",
        values=over_seeds(
            seeds, lambda h: over_layers(h.last, "anisotropy") - over_layers(h.first, "anisotropy")
        ),
        above=0,
    )
    yield ask(
        "anisotropy_grows_at_every_layer",
        "It grows at all internal layers.",
        quantity="end minus step 0, smallest over layers",
        values=over_seeds(seeds, lambda h: min(growth(h, "anisotropy"))),
        above=0,
    )
    yield ask(
        "anisotropy_stabilises",
        "The growth is followed by stabilisation.",
        quantity="last quarter of the steps minus third, over the range (even growth: 0.25)",
        values=over_seeds(seeds, lambda h: h.late_drift("anisotropy/mean")),
        above=-0.1,
        below=0.1,
    )


def _dimension(seeds: Sequence[History]) -> Iterator[Claim]:
    """The paper's estimator as its text states it; others are ours."""
    variants = [
        ("twonn_discard_0", "twonn/mean/discard_0", "TwoNN, no ratio dropped (the paper's text)"),
        ("twonn_discard_80", "twonn/mean/discard_80",
         "TwoNN, largest 80 % dropped (the authors' code)"),
        ("twonn", "twonn/mean", "TwoNN, largest 10 % dropped"),
        ("twonn_distinct", "twonn_distinct/mean", "TwoNN, one row per (character, position)"),
        *((f"gride_k{k}", f"gride/mean/k{k}", f"Gride, k = {k}") for k in (1, 2, 4, 8, 16, 32)),
    ]  # fmt: skip
    for name, tag, words in variants:
        ask = partial(
            Claim,
            source="2311.05928, section 4.3, fig. 2",
            variant=words,
            ours=name != "twonn_discard_0",
        )
        yield ask(
            f"{name}_expands",
            "The intrinsic dimension rises sharply at first.",
            quantity="relative change over the first quarter of the steps, mean over layers",
            values=over_seeds(seeds, partial(History.change, tag=tag, begin=0, end=QUARTER)),
            above=0,
        )
        yield ask(
            f"{name}_compresses",
            "The intrinsic dimension declines towards the end.",
            quantity="relative change from the first quarter to the end",
            values=over_seeds(seeds, partial(History.change, tag=tag, begin=QUARTER, end=1)),
            below=0,
        )


def _local_isotropy(seeds: Sequence[History]) -> Iterator[Claim]:
    """Their mean cosine about their own mean is not asked for: -1 / 63 in whatever directions."""
    ask = partial(Claim, source="2311.05928, section 3.1")
    yield ask(
        "neighbourhoods_isotropic",
        "Neighbourhoods are isotropic.",
        quantity="anisotropy of the 64 nearest rows over that of 64 rows of noise",
        values=over_seeds(
            seeds,
            lambda h: (
                over_layers(h.last, "local_anisotropy") / h.last.values["local_anisotropy/null"]
            ),
        ),
        below=2,
    )
    yield ask(
        "neighbourhoods_less_anisotropic",
        "Neighbourhoods are at least more isotropic than all rows together.",
        quantity="anisotropy of the 64 nearest rows over that of all rows, both less noise",
        values=over_seeds(
            seeds, lambda h: _excess(h, "local_anisotropy") / _excess(h, "anisotropy")
        ),
        below=1,
        ours=True,
    )


def _excess(history: History, metric: str) -> float:
    return over_layers(history.last, metric) - history.last.values[f"{metric}/null"]
