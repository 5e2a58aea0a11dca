"""Anisotropy and intrinsic dimension (Razzhigaev et al., 2311.05928)."""

from collections.abc import Iterator
from functools import partial

from recipes.decoder.questions.question import MODELS, Question
from recipes.study.history import QUARTER, History, changed, growth, over_layers

_THEIRS = "pretrained decoders of billions of parameters on subwords"


def questions() -> Iterator[Question[History]]:
    """List the questions of this paper."""
    yield from _anisotropy()
    yield from _dimension()
    yield from _local_isotropy()


def _anisotropy() -> Iterator[Question[History]]:
    ask = partial(
        Question[History], source="2311.05928, section 4.2 (figures 3, 4)", theirs=_THEIRS
    )
    yield ask(
        "anisotropy_grows",
        "The anisotropy of decoders grows during training.",
        "a growth pattern at all checkpoints",
        quantity="anisotropy at the end minus at step 0, mean over layers",
        measure=lambda h: over_layers(h.last, "anisotropy") - over_layers(h.first, "anisotropy"),
        above=0,
    )
    yield ask(
        "anisotropy_grows_at_every_layer",
        "It grows at all internal layers.",
        "profiles of later checkpoints lie above those of earlier ones",
        quantity="anisotropy at the end minus at step 0, the smallest over layers",
        measure=lambda h: min(growth(h, "anisotropy")),
        above=0,
    )
    yield ask(
        "anisotropy_stabilises",
        "The growth is followed by stabilisation.",
        "growth, followed by stabilisation",
        quantity=(
            "anisotropy in the last quarter of the steps minus in the third, over its range "
            "(0.25: it still grows evenly)"
        ),
        measure=lambda h: h.late_drift("anisotropy/mean"),
        above=-0.1,
        below=0.1,
    )


def _dimension() -> Iterator[Question[History]]:
    variants = [
        ("twonn", "twonn/mean", "TwoNN on all tokens, the largest 10 % of the ratios dropped"),
        (
            "twonn_discard_0",
            "twonn/mean/discard_0",
            "TwoNN with no ratio dropped, the paper's text",
        ),
        (
            "twonn_discard_80",
            "twonn/mean/discard_80",
            "TwoNN with the smallest 20 % of the ratios kept, the authors' published code",
        ),
        ("twonn_distinct", "twonn_distinct/mean", "TwoNN on one row per (character, position)"),
    ]
    variants += [
        (f"gride_k{k}", f"gride/mean/k{k}", f"Gride at scale {k}") for k in (1, 2, 4, 8, 16, 32)
    ]
    for name, tag, words in variants:
        ask = partial(
            Question[History], source="2311.05928, section 4.3 (figure 2)", theirs=_THEIRS
        )
        yield ask(
            f"{name}_expands",
            f"The intrinsic dimension rises sharply at first: {words}.",
            "a sharp rise in the initial stages",
            quantity="change from step 0 to a quarter of the steps, relative, mean over layers",
            measure=changed(tag, 0, QUARTER),
            above=0,
        )
        yield ask(
            f"{name}_compresses",
            f"It declines towards the end: {words}.",
            "a notable decline as training progresses",
            quantity="change from a quarter of the steps to the end, relative, mean over layers",
            measure=changed(tag, QUARTER, 1),
            below=0,
        )


def _local_isotropy() -> Iterator[Question[History]]:
    ask = partial(
        Question[History], source="2311.05928, section 3.1 (after Cai et al.)", theirs=MODELS
    )
    yield ask(
        "neighbourhoods_less_anisotropic",
        "Inside global anisotropy, neighbourhoods are more isotropic.",
        "within local subspaces, isotropy prevails",
        quantity=(
            "anisotropy of the 64 nearest rows over that of all rows, both less their values for "
            "noise, mean over layers, at the end"
        ),
        measure=lambda h: _excess(h, "local_anisotropy") / _excess(h, "anisotropy"),
        below=1,
    )
    yield ask(
        "neighbourhoods_isotropic",
        "Neighbourhoods are isotropic.",
        "within local subspaces, isotropy prevails",
        quantity=(
            "anisotropy of the 64 nearest rows over that of 64 rows of noise (below 2: nearer to "
            "noise than to twice it), mean over layers, at the end"
        ),
        measure=lambda h: (
            over_layers(h.last, "local_anisotropy") / h.last.values["local_anisotropy/null"]
        ),
        below=2,
    )
    yield ask(
        "neighbourhoods_have_no_cosine",
        "About their own mean, the rows of a neighbourhood point everywhere.",
        "within local subspaces, isotropy prevails",
        quantity="mean cosine of 64 nearest rows about their mean, mean over layers, at the end",
        measure=lambda h: over_layers(h.last, "local_cosine"),
        above=-0.05,
        below=0.05,
    )


def _excess(history: History, metric: str) -> float:
    return over_layers(history.last, metric) - history.last.values[f"{metric}/null"]
