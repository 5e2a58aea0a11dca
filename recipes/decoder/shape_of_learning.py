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
    ask = partial(Claim, source="2311.05928, section 4.2 (figures 3, 4)")
    yield ask(
        "anisotropy_grows",
        "The anisotropy of decoders grows during training.",
        published="a growth pattern at all checkpoints",
        quantity="anisotropy at the end minus at step 0, mean over layers",
        values=over_seeds(
            seeds, lambda h: over_layers(h.last, "anisotropy") - over_layers(h.first, "anisotropy")
        ),
        above=0,
    )
    yield ask(
        "anisotropy_grows_at_every_layer",
        "It grows at all internal layers.",
        published="profiles of later checkpoints lie above those of earlier ones",
        quantity="anisotropy at the end minus at step 0, the smallest over layers",
        values=over_seeds(seeds, lambda h: min(growth(h, "anisotropy"))),
        above=0,
    )
    yield ask(
        "anisotropy_stabilises",
        "The growth is followed by stabilisation.",
        published="growth, followed by stabilisation",
        quantity="anisotropy in the last quarter of the steps minus in the third, over its range "
        "(0.25: it still grows evenly)",
        values=over_seeds(seeds, lambda h: h.late_drift("anisotropy/mean")),
        above=-0.1,
        below=0.1,
    )


def _dimension(seeds: Sequence[History]) -> Iterator[Claim]:
    """The paper's estimator as its text states it; others are ours."""
    variants = [
        ("twonn_discard_0", "twonn/mean/discard_0", "TwoNN with no ratio dropped, the paper's text",
         ("a sharp rise in the initial stages", "a notable decline as training progresses")),
        ("twonn_discard_80", "twonn/mean/discard_80",
         "TwoNN with the smallest 20 % of the ratios kept, as the authors' code does", ("", "")),
        ("twonn", "twonn/mean", "TwoNN with the largest 10 % of the ratios dropped", ("", "")),
        ("twonn_distinct", "twonn_distinct/mean", "TwoNN on one row per (character, position)",
         ("", "")),
        *((f"gride_k{k}", f"gride/mean/k{k}", f"Gride at scale {k}", ("", ""))
          for k in (1, 2, 4, 8, 16, 32)),
    ]  # fmt: skip
    ask = partial(Claim, source="2311.05928, section 4.3 (figure 2)")
    for name, tag, words, (rise, decline) in variants:
        yield ask(
            f"{name}_expands",
            f"The intrinsic dimension rises sharply at first: {words}.",
            published=rise,
            quantity="change from step 0 to a quarter of the steps, relative, mean over layers",
            values=over_seeds(seeds, partial(History.change, tag=tag, begin=0, end=QUARTER)),
            above=0,
        )
        yield ask(
            f"{name}_compresses",
            f"It declines towards the end: {words}.",
            published=decline,
            quantity="change from a quarter of the steps to the end, relative, mean over layers",
            values=over_seeds(seeds, partial(History.change, tag=tag, begin=QUARTER, end=1)),
            below=0,
        )


def _local_isotropy(seeds: Sequence[History]) -> Iterator[Claim]:
    """Their mean cosine about their own mean is not asked for: -1 / 63 in whatever directions."""
    ask = partial(Claim, source="2311.05928, section 3.1 (after Cai et al.)")
    yield ask(
        "neighbourhoods_isotropic",
        "Neighbourhoods are isotropic.",
        published="within local subspaces, isotropy prevails",
        quantity="anisotropy of the 64 nearest rows over that of 64 rows of noise (below 2: nearer "
        "to noise than to twice it), mean over layers, at the end",
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
        quantity="anisotropy of the 64 nearest rows over that of all rows, both less their values "
        "for noise, mean over layers, at the end",
        values=over_seeds(
            seeds, lambda h: _excess(h, "local_anisotropy") / _excess(h, "anisotropy")
        ),
        below=1,
    )


def _excess(history: History, metric: str) -> float:
    return over_layers(history.last, metric) - history.last.values[f"{metric}/null"]
