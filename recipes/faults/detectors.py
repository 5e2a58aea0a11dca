"""Detectors: from the numbers of a training to one score a reading, the higher the stranger."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon.analysis import find_phase
from geomon.analysis.bands import (
    LEAST,
    SCATTER,
    SCATTER_READINGS,
    SLOW,
    WATCHED,
    Distance,
    measure_distance,
    scatter,
    start_of_window,
)
from recipes.faults.track import MARGIN, MEAN, MEAN_MARGIN, Array, Place, Track

# Readings over which OLMo-core's stability monitor takes its mean and deviation; 128 there.
_OLMO_WINDOW = 96
# What a score of CUSUM forgets of each reading, in standard errors.
_SLACK = 1.0
# Numbers that are followed by their logarithms.
_LOGARITHMS = {name for name, watched in WATCHED.items() if watched.by_logarithm} | {
    "loss", "gradient_norm", "kurtosis", "mean_square_norm",
}  # fmt: skip


class Scores(NamedTuple):
    """What a detector says of a training.

    Attributes:
        steps: Steps of the readings that are scored, [readings].
        scores: Score of each reading, [readings]; NaN where there is none.
        places: Place with the largest score at each reading, [readings].
    """

    steps: NDArray[np.int64]
    scores: Array
    places: Sequence[Place]


class Distances(NamedTuple):
    """How far the numbers of a training are from the lines through those before.

    Attributes:
        steps: Steps, [readings].
        places: The numbers.
        sizes: Distances in units of the bands, above 1 outside, [readings, places].
        normed: Distances with their signs in standard errors, [readings, places].
    """

    steps: NDArray[np.int64]
    places: list[Place]
    sizes: Array
    normed: Array


def distances(track: Track) -> Distances:
    """Compare each number at each reading with the line through those before it.

    Every fifth reading is compared with every fifth before it too, as bands do.
    """
    places = [place for place in track.values if place.part != MARGIN]
    columns = []
    for place in places:
        values = track.values[place]
        if place.metric in _LOGARITHMS:
            values = np.log(np.maximum(values, 1e-9))
        columns.append(values)
    numbers = np.stack(columns, axis=1)
    least = np.array([WATCHED[p.metric].least if p.metric in WATCHED else 0.0 for p in places])
    sizes, normed = np.full(numbers.shape, np.nan), np.full(numbers.shape, np.nan)
    # What is computed at every fifth step is compared with itself five steps before.
    known = np.isfinite(numbers)
    for pattern in np.unique(known, axis=1).T:
        alike = np.flatnonzero((known == pattern[:, None]).all(axis=0))
        steps, at = track.steps[pattern], np.flatnonzero(pattern)
        chosen = numbers[np.ix_(at, alike)]
        for reading in range(LEAST, len(at)):
            found = _compare(chosen, steps, reading, least[alike])
            size = found.size
            if reading % SLOW == 0:
                slow = _compare(chosen, steps, reading, least[alike], every=SLOW)
                size = np.fmax(size, slow.size)
            sizes[at[reading], alike], normed[at[reading], alike] = size, found.normed
    return Distances(track.steps, places, sizes, normed)


def _compare(
    numbers: Array, steps: NDArray[np.int64], reading: int, least: Array, every: int = 1
) -> Distance:
    """Compare the numbers of a reading with every so many of those before."""
    start = start_of_window(steps[:reading:every], int(steps[reading]))
    return measure_distance(numbers[:reading:every][start:], numbers[reading], least)


def scores_of_bands(found: Distances, metrics: Iterable[str]) -> Scores:
    """Score readings by the number that is furthest outside of its band."""
    wanted = set(metrics)
    chosen = [number for number, place in enumerate(found.places) if place.metric in wanted]
    places = [found.places[number] for number in chosen]
    return _largest(found.steps, found.sizes[:, chosen], places)


def scores_of_alerts(found: Distances) -> Scores:
    """Score readings as alerts do: by the number furthest outside, or by the scatter of all."""
    departures = scores_of_bands(found, WATCHED)
    all_values = scores_of_scatter(found)
    first = np.nan_to_num(departures.scores) >= np.nan_to_num(all_values.scores)
    pairs = zip(first, departures.places, all_values.places, strict=True)
    return Scores(
        found.steps, np.fmax(departures.scores, all_values.scores),
        [one if is_first else other for is_first, one, other in pairs],
    )  # fmt: skip


def scores_of_scatter(found: Distances) -> Scores:
    """Score readings by the scatter of all numbers that alerts watch; above 1 is an alert."""
    of_pass = {name for name, watched in WATCHED.items() if not watched.by_part}
    chosen = [number for number, place in enumerate(found.places) if place.metric in of_pass]
    each = np.array([scatter(normed[chosen]) for normed in found.normed])
    scores = np.full(len(each), np.nan)
    for reading in range(SCATTER_READINGS - 1, len(each)):
        scores[reading] = each[reading - SCATTER_READINGS + 1 : reading + 1].mean() / SCATTER
    return Scores(found.steps, scores, [Place("")] * len(each))


def scores_of_cusum(found: Distances, metrics: Iterable[str]) -> Scores:
    """Score readings by a sum of distances on one side that forgets a part at each reading."""
    wanted = set(metrics)
    chosen = [number for number, place in enumerate(found.places) if place.metric in wanted]
    sums = np.zeros((2, len(chosen)))
    scores = np.full((len(found.steps), len(chosen)), np.nan)
    for reading, size in enumerate(found.normed[:, chosen]):
        known = np.nan_to_num(size)
        sums = np.maximum(0.0, sums + np.stack([known, -known]) - _SLACK)
        scores[reading] = np.where(np.isfinite(size), sums.max(axis=0), np.nan)
    return _largest(found.steps, scores, [found.places[number] for number in chosen])


def scores_of_limits(track: Track) -> Scores:
    """Score readings by fixed limits: of entropy, largest score and rank; above 1 is beyond.

    A place that is beyond its limit at the first reading never scores.
    """
    limits: dict[str, Callable[[Array], Array]] = {
        "attention_entropy_normalised": lambda values: 0.05 / np.maximum(values, 1e-9),
        "max_logit": lambda values: values / 100.0,
        "effective_rank": lambda values: 1.1 / values,
    }
    places = [place for name in limits for place in track.places(name) if place.part != MARGIN]
    columns = [limits[place.metric](track.values[place]) for place in places]
    within = [np.where(column[:1] > 1, np.nan, column) for column in columns]
    return _largest(track.steps, np.stack(within, axis=1), places)


def scores_as_olmo(track: Track, metric: str) -> Scores:
    """Score readings by their distance above a mean, in deviations, as OLMo-core does."""
    place = Place(metric)
    values = track.values[place]
    scores = np.full(len(values), np.nan)
    for reading in range(_OLMO_WINDOW, len(values)):
        before = values[reading - _OLMO_WINDOW : reading]
        scores[reading] = (values[reading] - before.mean()) / before.std()
    return Scores(track.steps, scores, [place] * len(values))


def scores_by_margins(track: Track, metric: str) -> Scores:
    """Score readings by the change since the reading before, in errors that the margins give."""
    places = [p for p in track.places(metric) if p.part != MARGIN and p.layer > 0]
    columns = []
    for place in places:
        values, margins = track.values[place], track.values[Place(metric, place.layer, MARGIN)]
        change = np.abs(np.diff(values)) / np.hypot(margins[1:], margins[:-1])
        columns.append(np.concatenate([[np.nan], change]))
    return _largest(track.steps, np.stack(columns, axis=1), places)


def scores_of_phases(track: Track, metric: str) -> Scores:
    """Score a reading 1 where the phase that it is in is another than at the reading before."""
    place = Place(metric, 0, MEAN)
    missing = np.full(len(track.steps), np.nan)
    values = track.values.get(place, missing).tolist()
    margins = track.values.get(Place(metric, 0, MEAN_MARGIN), missing).tolist()
    steps = track.steps.tolist()
    names = [find_phase(steps[:n], values[:n], margins[:n]).name for n in range(1, len(steps) + 1)]
    changed = [float(one != other) for one, other in zip(names[1:], names[:-1], strict=True)]
    return Scores(track.steps, np.array([np.nan, *changed]), [place] * len(steps))


def _largest(steps: NDArray[np.int64], scores: Array, places: Sequence[Place]) -> Scores:
    if not places:
        return Scores(steps, np.full(len(steps), np.nan), [Place("")] * len(steps))
    known = np.where(np.isfinite(scores), scores, -np.inf)
    first = known.argmax(axis=1)
    largest = known[np.arange(len(known)), first]
    return Scores(
        steps, np.where(np.isfinite(largest), largest, np.nan), [places[n] for n in first]
    )


class Detector(NamedTuple):
    """A number for each reading, above which there is an alarm.

    Attributes:
        words: What it looks at, for a table.
        group: "training", "geometry" or "others" (proposed elsewhere, of weights and layers).
        score: Function of the distances of a training, or of the training if `of_track`.
        of_track: Whether the numbers themselves are scored.
    """

    words: str
    group: str
    score: Callable[[Any], Scores]
    of_track: bool = False


def _bands(words: str, group: str, *metrics: str) -> Detector:
    return Detector(words, group, partial(scores_of_bands, metrics=metrics))


def _cusum(words: str, metric: str) -> Detector:
    return Detector(f"{words}, CUSUM", "others", partial(scores_of_cusum, metrics=[metric]))


def _olmo(words: str, metric: str) -> Detector:
    score = partial(scores_as_olmo, metric=metric)
    return Detector(f"{words}, as OLMo-core", "training", score, of_track=True)


DETECTORS = {
    "loss": _bands("loss", "training", "loss"),
    "loss_olmo": _olmo("loss", "loss"),
    "gradient_norm": _bands("gradient norm", "training", "gradient_norm"),
    "gradient_norm_olmo": _olmo("gradient norm", "gradient_norm"),
    "both": _bands("loss and gradient norm", "training", "loss", "gradient_norm"),
    "max_logit": _bands("largest attention score", "geometry", "max_logit"),
    "entropy": _bands("attention entropy", "geometry", "attention_entropy_normalised"),
    "attention_sink": _bands("attention on the sink", "geometry", "attention_sink"),
    "qk_cosine": _bands("cosine of mean query and key", "geometry", "qk_cosine"),
    "qk_dot": _bands("product of mean query and key", "geometry", "qk_dot"),
    "variance": _bands("variance", "geometry", "variance"),
    "within_variance": _bands("variance within token types", "geometry", "within_variance"),
    "anisotropy": _bands("anisotropy", "geometry", "anisotropy"),
    "effective_rank": _bands("effective rank", "geometry", "effective_rank"),
    "weight_norm": _bands("norm of the weights", "geometry", "weight_norm"),
    "expert_load": _bands("evenness of the experts' loads", "geometry", "expert_load"),
    "kurtosis": _bands("kurtosis", "others", "kurtosis"),
    "kurtosis_cusum": _cusum("kurtosis", "kurtosis"),
    "rms": _bands("root mean square", "others", "mean_square_norm"),
    "rms_cusum": _cusum("root mean square", "mean_square_norm"),
    "update_entropy": _bands(
        "spectral entropy of the update of W_q W_k^T", "others", "update_entropy"
    ),
    "stable_rank": _bands("stable rank of weights", "others", "stable_rank"),
    "near_unit_modes": _bands("modes near the unit circle", "others", "near_unit_modes"),
    "departure": _bands("departure of any value", "geometry", *WATCHED),
    "scatter": Detector("scatter of all values", "geometry", scores_of_scatter),
    "limits": Detector("fixed limits", "geometry", scores_of_limits, of_track=True),
    "geometry": Detector("geomon's alerts", "geometry", scores_of_alerts),
}

# Those that need margins, so that they are read every 20 steps.
OF_MARGINS: dict[str, tuple[str, Callable[[Track], Scores]]] = {
    "twonn": ("intrinsic dimension, by its intervals", partial(scores_by_margins, metric="twonn")),
    "twonn_distinct": (
        "the same of distinct tokens", partial(scores_by_margins, metric="twonn_distinct")
    ),
    "anisotropy": ("anisotropy, by its intervals", partial(scores_by_margins, metric="anisotropy")),
    "phase": (
        "change of phase of the intrinsic dimension", partial(scores_of_phases, metric="twonn")
    ),
}  # fmt: skip


def score_all(
    track: Track, names: Iterable[str] = tuple(DETECTORS)
) -> Iterator[tuple[str, Scores]]:
    """Apply detectors to a training."""
    found = distances(track)
    for name in names:
        detector = DETECTORS[name]
        yield name, detector.score(track if detector.of_track else found)
