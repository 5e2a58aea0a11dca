"""Norm of the mean and variance (Yamagiwa and Shimodaira, 2409.11253)."""

from collections.abc import Iterator
from functools import partial

from recipes.decoder.questions.question import NORMED, Question
from recipes.study.history import History, over_layers, with_depth

_THEIRS = "pretrained models on subwords; our types are characters, our blocks norm their input"


def questions() -> Iterator[Question[History]]:
    """List the questions of this paper."""
    yield from _norm_and_variance()
    yield from _shares()


def _norm_and_variance() -> Iterator[Question[History]]:
    ask = partial(Question[History], source="2409.11253, abstract", theirs=_THEIRS)
    yield ask(
        "mean_and_variance_make_the_norm",
        "Squared norm of the mean and variance add up to the mean squared norm.",
        "the well-known formula, Q = M + V",
        quantity="largest |M + V - Q| / Q over layers and readings (rounding: below 1e-9)",
        measure=_worst_identity,
        below=1e-9,
    )
    yield ask(
        "norm_trades_for_variance",
        "Token types whose mean is nearer to the origin have more variance.",
        "a strong trade-off relationship",
        quantity="slope of V_t on M_t over types, mean over layers, at the end",
        measure=lambda h: over_layers(h.last, "norm_variance_slope"),
        below=0,
    )
    yield ask(
        "trade_off_is_strong",
        "The trade-off is strong.",
        "a strong trade-off relationship",
        quantity="R^2 of V_t on M_t over types (above .5: most), mean over layers, at the end",
        measure=lambda h: h.last.values["norm_variance_slope/mean/r_squared"],
        above=0.5,
    )
    yield ask(
        "trade_off_beyond_arithmetic",
        "The trade-off is more than arithmetic makes.",
        "a relationship, without this control",
        quantity=(
            "slope of V_t on M_t minus that of types assigned at random, mean over layers, at the "
            "end"
        ),
        measure=lambda h: (
            over_layers(h.last, "norm_variance_slope")
            - over_layers(h.last, "norm_variance_slope_shuffled")
        ),
        below=0,
    )
    yield ask(
        "norm_makes_the_trade_off",
        "Layer normalisation makes the trade-off.",
        "likely influenced by the layer normalization mechanism",
        quantity=(
            "slope of V_t on M_t behind the final norm minus that of the last block's output, at "
            "the end"
        ),
        measure=lambda h: (
            h.last.values[f"norm_variance_slope/{NORMED}"]
            - over_layers(h.last, "norm_variance_slope", lambda profile: profile[-1])
        ),
        below=0,
    )


def _shares() -> Iterator[Question[History]]:
    ask = partial(Question[History], source="2409.11253, abstract", theirs=_THEIRS)
    for name, metric, part, asserts, published, sign in (
        ("mean_moves_away", "drift_norm", "",
         "In deeper layers the mean is farther from the origin.",
         "embeddings move farther from the origin", 1),
        ("share_of_mean_grows", "variance_shares", "mean",
         "It is farther relative to the norms, too.",
         "embeddings move farther from the origin", 1),
        ("share_between_falls", "variance_shares", "",
         "As layers deepen, the variance between token types falls, as a share.",
         "the between-cluster variance relatively decreases", -1),
        ("share_within_grows", "variance_shares", "",
         "As layers deepen, the variance within token types grows, as a share.",
         "the within-cluster variance relatively increases", 1),
    ):  # fmt: skip
        # What is not within the types is between them: its share of the variance falls as the other
        # grows.
        falls = sign < 0
        words = f"{metric}/{part}" if part else metric
        words = f"1 - {words}" if falls else words
        yield ask(
            name,
            asserts,
            published,
            quantity=f"Spearman's correlation of {words} with the number of the layer, at the end",
            measure=partial(_with_depth, metric, part, sign),
            above=None if falls else 0,
            below=0 if falls else None,
        )


def _with_depth(metric: str, part: str, sign: int, history: History) -> float:
    return sign * with_depth(history.last, metric, part)


def _worst_identity(history: History) -> float:
    """Largest relative deviation of M + V from Q over layers and readings."""
    return max(
        abs(drift**2 + reading.column("variance").at(layer) - square) / square
        for reading in history.readings
        for layer, square in reading.column("mean_square_norm").by_layer().items()
        for drift in [reading.column("drift_norm").at(layer)]
    )
