"""Detectors: from the numbers of a training to one score a reading, the higher the stranger."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

    Args:
        track: Numbers of a training.
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
    """Score readings by the number that is furthest outside of its band.

    Args:
        found: Distances of a training.
        metrics: Metrics that are looked at.
    """
    wanted = set(metrics)
    chosen = [number for number, place in enumerate(found.places) if place.metric in wanted]
    places = [found.places[number] for number in chosen]
    return _largest(found.steps, found.sizes[:, chosen], places)


def scores_of_alerts(found: Distances) -> Scores:
    """Score readings as alerts do: by the number furthest outside, or by the scatter of all.

    Args:
        found: Distances of a training.
    """
    departures = scores_of_bands(found, WATCHED)
    all_values = scores_of_scatter(found)
    first = np.nan_to_num(departures.scores) >= np.nan_to_num(all_values.scores)
    pairs = zip(first, departures.places, all_values.places, strict=True)
    return Scores(
        found.steps, np.fmax(departures.scores, all_values.scores),
        [one if is_first else other for is_first, one, other in pairs],
    )  # fmt: skip


def scores_of_scatter(found: Distances) -> Scores:
    """Score readings by the scatter of all numbers that alerts watch; above 1 is an alert.

    Args:
        found: Distances of a training.
    """
    of_pass = {name for name, watched in WATCHED.items() if not watched.by_part}
    chosen = [number for number, place in enumerate(found.places) if place.metric in of_pass]
    each = np.array([scatter(normed[chosen]) for normed in found.normed])
    scores = np.full(len(each), np.nan)
    for reading in range(SCATTER_READINGS - 1, len(each)):
        scores[reading] = each[reading - SCATTER_READINGS + 1 : reading + 1].mean() / SCATTER
    return Scores(found.steps, scores, [Place("")] * len(each))


def scores_of_cusum(found: Distances, metrics: Iterable[str]) -> Scores:
    """Score readings by a sum of distances on one side that forgets a part at each reading.

    Args:
        found: Distances of a training.
        metrics: Metrics that are looked at.
    """
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

    Args:
        track: Numbers of a training.
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
    """Score readings by their distance above a mean, in deviations, as OLMo-core does.

    Args:
        track: Numbers of a training.
        metric: "loss" or "gradient_norm".
    """
    place = Place(metric)
    values = track.values[place]
    scores = np.full(len(values), np.nan)
    for reading in range(_OLMO_WINDOW, len(values)):
        before = values[reading - _OLMO_WINDOW : reading]
        scores[reading] = (values[reading] - before.mean()) / before.std()
    return Scores(track.steps, scores, [place] * len(values))


def scores_by_margins(track: Track, metric: str) -> Scores:
    """Score readings by the change since the reading before, in errors that the margins give.

    Args:
        track: Numbers of a training, from readings with margins.
        metric: Name of a metric of layers.
    """
    places = [p for p in track.places(metric) if p.part != MARGIN and p.layer > 0]
    columns = []
    for place in places:
        values, margins = track.values[place], track.values[Place(metric, place.layer, MARGIN)]
        change = np.abs(np.diff(values)) / np.hypot(margins[1:], margins[:-1])
        columns.append(np.concatenate([[np.nan], change]))
    return _largest(track.steps, np.stack(columns, axis=1), places)


def scores_of_phases(track: Track, metric: str) -> Scores:
    """Score a reading 1 where the phase that it is in is another than at the reading before.

    Args:
        track: Numbers of a training, from readings with margins.
        metric: Name of a metric of layers, of whose mean the phase is.
    """
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


@dataclass(frozen=True)
class Detector:
    """A number for each reading, above which there is an alarm.

    Attributes:
        words: What it looks at, for a table.
        score: Function of a training and its distances.
        group: "training", "geometry" or "others" (proposed elsewhere, of weights and layers).
    """

    words: str
    score: Callable[[Track, Distances], Scores]
    group: str


def _bands(*metrics: str) -> Callable[[Track, Distances], Scores]:
    return lambda track, found: scores_of_bands(found, metrics)


def _cusum(*metrics: str) -> Callable[[Track, Distances], Scores]:
    return lambda track, found: scores_of_cusum(found, metrics)


def _olmo(metric: str) -> Callable[[Track, Distances], Scores]:
    return lambda track, found: scores_as_olmo(track, metric)


DETECTORS = {
    "loss": Detector("loss", _bands("loss"), "training"),
    "loss_olmo": Detector("loss, as OLMo-core", _olmo("loss"), "training"),
    "gradient_norm": Detector("gradient norm", _bands("gradient_norm"), "training"),
    "gradient_norm_olmo": Detector(
        "gradient norm, as OLMo-core", _olmo("gradient_norm"), "training"
    ),
    "both": Detector("loss and gradient norm", _bands("loss", "gradient_norm"), "training"),
    "max_logit": Detector("largest attention score", _bands("max_logit"), "geometry"),
    "entropy": Detector("attention entropy", _bands("attention_entropy_normalised"), "geometry"),
    "attention_sink": Detector("attention on the sink", _bands("attention_sink"), "geometry"),
    "qk_cosine": Detector("cosine of mean query and key", _bands("qk_cosine"), "geometry"),
    "qk_dot": Detector("product of mean query and key", _bands("qk_dot"), "geometry"),
    "variance": Detector("variance", _bands("variance"), "geometry"),
    "within_variance": Detector(
        "variance within token types", _bands("within_variance"), "geometry"
    ),
    "anisotropy": Detector("anisotropy", _bands("anisotropy"), "geometry"),
    "effective_rank": Detector("effective rank", _bands("effective_rank"), "geometry"),
    "weight_norm": Detector("norm of the weights", _bands("weight_norm"), "geometry"),
    "expert_load": Detector("evenness of the experts' loads", _bands("expert_load"), "geometry"),
    "kurtosis": Detector("kurtosis", _bands("kurtosis"), "others"),
    "kurtosis_cusum": Detector("kurtosis, CUSUM", _cusum("kurtosis"), "others"),
    "rms": Detector("root mean square", _bands("mean_square_norm"), "others"),
    "rms_cusum": Detector("root mean square, CUSUM", _cusum("mean_square_norm"), "others"),
    "update_entropy": Detector(
        "spectral entropy of the update of W_q W_k^T", _bands("update_entropy"), "others"
    ),
    "stable_rank": Detector("stable rank of weights", _bands("stable_rank"), "others"),
    "near_unit_modes": Detector("modes near the unit circle", _bands("near_unit_modes"), "others"),
    "departure": Detector("departure of any value", _bands(*WATCHED), "geometry"),
    "scatter": Detector(
        "scatter of all values", lambda _, found: scores_of_scatter(found), "geometry"
    ),
    "limits": Detector("fixed limits", lambda track, _: scores_of_limits(track), "geometry"),
    "geometry": Detector("geomon's alerts", lambda _, found: scores_of_alerts(found), "geometry"),
}

# Those that need margins, so that they are read every 20 steps.
OF_MARGINS: dict[str, tuple[str, Callable[[Track], Scores]]] = {
    "twonn": (
        "intrinsic dimension, by its intervals",
        lambda track: scores_by_margins(track, "twonn"),
    ),
    "twonn_distinct": (
        "the same of distinct tokens",
        lambda track: scores_by_margins(track, "twonn_distinct"),
    ),
    "anisotropy": ("anisotropy, by its intervals", lambda t: scores_by_margins(t, "anisotropy")),
    "phase": ("change of phase of the intrinsic dimension", lambda t: scores_of_phases(t, "twonn")),
}


def score_all(
    track: Track, names: Iterable[str] = tuple(DETECTORS)
) -> Iterator[tuple[str, Scores]]:
    """Apply detectors to a training.

    Args:
        track: Numbers of the training.
        names: Names of the detectors.
    """
    found = distances(track)
    for name in names:
        yield name, DETECTORS[name].score(track, found)
