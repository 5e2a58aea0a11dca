"""Random inputs held to references in float64: python -m benchmarks.fuzz.

`--rows 100000` inputs to `geometry` (kinds of clouds, sizes, types of number, containers, ids) and
`--models 1000` small transformers to `measure` (forms of attention, masks, norms, shapes, types,
columns of the batch). The references are written here from the definitions, with direct
differences, and use no kernel of geomon. An input counts as

- a crash: an exception, where the input has 3 finite rows or more;
- a hang: no answer within the time limit;
- wrong: a value off by more than rounding, or a value that is not finite without a note on it.

Every input has a seed of its own, which is printed: `--seed N --rows 1` repeats it.
"""

import math
import re
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import torch
import typer
from scipy.optimize import brentq

from benchmarks.random_models import Draw, draw_model
from geomon import METRICS, geometry, measure, select

TIME_LIMIT = 20  # seconds for one input
PROGRESS = 2000  # inputs between two lines of counts
SCALES = (1, 2, 4, 8, 16, 32)
# Powers of the scale of the rows with which values grow.
DEGREES = {
    "drift_norm": 1, "variance": 2, "mean_square_norm": 2, "within_variance": 2,
    "variance_shares/between_variance": 2,
}  # fmt: skip
Array = np.ndarray[Any, Any]


class HangError(Exception):
    """The time limit of one input is over."""


# Clouds.


def _gaussian(rng: np.random.Generator, n: int, width: int) -> Array:
    return rng.standard_normal((n, width)) * np.exp(rng.normal(0, rng.choice([0, 1, 3]), width))


def _low_rank(rng: np.random.Generator, n: int, width: int) -> Array:
    rank = int(rng.integers(1, width + 1))
    return rng.standard_normal((n, rank)) @ rng.standard_normal((rank, width))


def _near_duplicates(rng: np.random.Generator, n: int, width: int) -> Array:
    groups = int(rng.integers(1, max(2, n // 3)))
    centres = rng.standard_normal((groups, width))
    noise = 10.0 ** rng.choice([-3, -5, -8, -8, -10]) * rng.standard_normal((n, width))
    return centres[rng.integers(groups, size=n)] + noise


def _massive(rng: np.random.Generator, n: int, width: int) -> Array:
    rows = rng.standard_normal((n, width))
    count = int(rng.integers(1, max(2, n // 15)))
    rows[rng.choice(n, count, replace=False)] *= 10.0 ** rng.uniform(1, 5)
    return rows


def _copies(rng: np.random.Generator, n: int, width: int) -> Array:
    rows = rng.standard_normal((n, width))
    return rows[rng.integers(max(1, n // int(rng.integers(1, 9))), size=n)]


def _line(rng: np.random.Generator, n: int, width: int) -> Array:
    places = np.arange(n) if rng.random() < 0.5 else rng.random(n)
    return (
        np.outer(places, rng.standard_normal(width))
        if rng.random() < 0.5
        else np.repeat(places[:, None].astype(float), width, axis=1)
    )


def _grid(rng: np.random.Generator, n: int, width: int) -> Array:
    return rng.integers(0, int(rng.integers(2, 6)), (n, width)).astype(float)


def _heavy(rng: np.random.Generator, n: int, width: int) -> Array:
    return rng.standard_t(rng.choice([1.5, 3, 5]), (n, width))


def _clusters(rng: np.random.Generator, n: int, width: int) -> Array:
    centres = 10.0 ** rng.uniform(0, 4) * rng.standard_normal((int(rng.integers(1, 6)), width))
    return centres[rng.integers(len(centres), size=n)] + rng.standard_normal((n, width))


def _flat(rng: np.random.Generator, n: int, width: int) -> Array:
    rows = _gaussian(rng, n, width)
    rows[:, rng.random(width) < 0.5] = rng.normal()
    return rows


def _sphere(rng: np.random.Generator, n: int, width: int) -> Array:
    rows = rng.standard_normal((n, width))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


CLOUDS = (
    _gaussian, _low_rank, _near_duplicates, _massive, _copies, _line, _grid, _heavy, _clusters,
    _flat, _sphere,
)  # fmt: skip
DTYPES = ("float32",) * 4 + ("float64",) * 4 + ("float16", "bfloat16", "float8_e4m3fn", "int64")


def draw_rows(rng: np.random.Generator) -> tuple[dict[str, Any], Array, str]:
    """Draw what is given to `geometry`, the same numbers in float64, and words for them."""
    n = int(rng.integers(3, 40)) if rng.random() < 0.7 else int(rng.integers(40, 250))
    width = int(rng.integers(1, 13)) if rng.random() < 0.95 else int(rng.integers(13, 80))
    cloud = CLOUDS[rng.integers(len(CLOUDS))]
    rows = cloud(rng, n, width)
    if rng.random() < 0.3:
        rows = rows + 10.0 ** rng.uniform(-1, 6) * rng.standard_normal(width)
    dtype = str(rng.choice(DTYPES))
    reach = {"float64": 8, "float32": 8}.get(dtype, 0)
    power = float(rng.uniform(-reach, reach)) if rng.random() < 0.5 else 0.0
    if dtype == "float64" and rng.random() < 0.1:
        power = float(rng.uniform(-300, 290))
    rows = rows * 10.0**power
    if rng.random() < 0.1:
        rows[rng.random(n) < 0.2, rng.integers(width)] = rng.choice([np.nan, np.inf, -np.inf])
    kind = getattr(torch, dtype)
    source = np.nan_to_num(rows, nan=0, posinf=0, neginf=0) if dtype == "int64" else rows
    given: Any = torch.tensor(source).to(kind)
    exact = given.double().numpy()
    container = str(rng.choice(["tensor", "array", "big-endian", "reversed", "fortran", "list"]))
    if container != "tensor" and not dtype.startswith(("bfloat", "float8")):
        array = given.numpy()
        given = {
            "array": lambda: array,
            "big-endian": lambda: array.astype(array.dtype.newbyteorder(">")),
            "reversed": lambda: np.ascontiguousarray(array[::-1])[::-1],
            "fortran": lambda: np.asfortranarray(array),
            "list": lambda: array.astype(float).tolist(),
        }[container]()
        if container == "list":
            dtype = "float64"
    inputs = {"hidden": given}
    if rng.random() < 0.6:
        types = int(rng.integers(1, 12)) if rng.random() < 0.8 else n
        ids: Any = rng.integers(0, types, n)
        form = rng.integers(6)
        inputs["token_ids"] = [
            ids, ids.astype(float), torch.tensor(ids), ids - 100, ids.astype("uint16"),
            ids * 2**55,
        ][form]  # fmt: skip
        if rng.random() < 0.5:
            inputs["positions"] = rng.integers(0, int(rng.integers(1, 300)), n) * (
                2**50 if rng.random() < 0.1 else 1
            )
    return inputs, exact, f"{cloud.__name__[1:]} {n} x {width} {dtype} {container} 1e{power:.0f}"


# The values of rows by their definitions.


def lower_median(values: Array) -> Array:
    """Return the lower of the two middle values, down the first axis."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def expected_of_rows(rows: Array, ids: Array | None, positions: Array | None) -> dict[str, float]:
    """Compute the values of `geometry` from their definitions, in float64."""
    n = len(rows)
    mean = rows.mean(axis=0)
    centred = rows - rows[0]
    centred = centred - centred.mean(axis=0)
    values: dict[str, float] = {
        "drift_norm": float(np.linalg.norm(mean)),
        "mean_square_norm": float(np.square(rows).sum() / n),
        "variance": float(np.square(centred).sum() / n),
    }
    values |= _spectral(centred)
    middle = lower_median(rows)
    far = np.linalg.norm(rows - middle, axis=1)
    scale = lower_median(far)
    massive_rows = far > 10 * scale
    if not scale > 0 or (far > 5 * scale).sum() > 0.05 * n:
        massive_rows[:] = False
    share = np.square(centred[massive_rows]).sum() / max(np.square(centred).sum(), 1e-300)
    values["sink_share"] = float(share) if massive_rows.any() else 0.0
    rest = rows[~massive_rows]
    rest = rest - rest[0]
    values["anisotropy_no_sinks"] = _spectral(rest - rest.mean(axis=0))["anisotropy"]
    values["cosine"] = _pairwise_cosine(rows)
    if ids is not None:
        values |= _by_type(rows, ids, values["variance"])
    first = np.sort(np.unique(rows + 0.0, axis=0, return_index=True)[1])
    values |= dimensions(rows, rows[first])
    values["twonn/n"], values["twonn/duplicates"] = float(len(first)), 1 - len(first) / n
    if ids is not None and len(first) == n:  # else it depends on which of equal rows stands for all
        places = np.zeros(n, dtype=int) if positions is None else positions
        kinds = np.unique(np.stack([ids[first], places[first]], axis=1), axis=0)
        values["twonn_distinct/n"] = float(len(kinds))
        values["twonn_distinct/repeated"] = 1 - len(kinds) / n
        if len(kinds) == len(first):  # otherwise it depends on which row stands for each kind
            values["twonn_distinct"] = values["twonn"]
    return values


def _spectral(centred: Array) -> dict[str, float]:
    energy = np.linalg.svd(centred, compute_uv=False) ** 2
    if not energy.sum() > 0:
        return dict.fromkeys(("anisotropy", "effective_rank", "participation_ratio"), math.nan)
    share = energy / energy.sum()
    positive = share[share > 0]
    return {
        "anisotropy": float(share[0]),
        "effective_rank": float(np.exp(-(positive * np.log(positive)).sum())),
        "participation_ratio": float(1 / np.square(share).sum()),
    }


def _pairwise_cosine(rows: Array) -> float:
    largest = np.abs(rows).max(axis=1)
    rows = rows[largest > 0] / largest[largest > 0, None]
    if len(rows) < 2:
        return math.nan
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return float((unit @ unit.T)[~np.eye(len(rows), dtype=bool)].mean())


def _by_type(rows: Array, ids: Array, variance: float) -> dict[str, float]:
    counts, norms, spreads, scatter = [], [], [], 0.0
    kinds = np.unique(ids)
    for kind in kinds:
        own = rows[ids == kind]
        apart = own - own[0]
        apart = apart - apart.mean(axis=0)
        squares = float(np.square(apart).sum())
        scatter += squares
        if len(own) >= 10:
            spread = squares / (len(own) - 1)
            counts.append(len(own))
            spreads.append(spread)
            norms.append(float(np.square(own.mean(axis=0)).sum()) - spread / len(own))
    within = scatter / (len(rows) - len(kinds)) if len(rows) > len(kinds) else math.nan
    values = {
        "within_variance": within,
        "variance_shares/between_variance": variance - within,
        "norm_variance_slope/types": float(len(counts)),
        "norm_variance_slope/coverage": sum(counts) / len(rows),
    }
    if len(counts) < 3:
        return values | {"norm_variance_slope": math.nan}
    x, y = np.array(norms), np.array(spreads)
    x, y = x - x.mean(), y - y.mean()
    # Where the norms are as good as equal, the slope is a quotient of roundings.
    if np.abs(x).max() > 1e-7 * (np.abs(norms).max() + variance):
        x, size = x / np.abs(x).max(), np.abs(x).max()
        values["norm_variance_slope"] = float((x * y).sum() / np.square(x).sum() / size)
    return values


def dimensions(rows: Array, unique: Array) -> dict[str, float]:
    """TwoNN, its censored form and Gride, by direct differences of all pairs."""
    if len(unique) < 3:
        return {"twonn": math.nan, **{f"gride/k{k}": math.nan for k in SCALES}}
    size = np.abs(unique - unique[0]).max()
    apart = (unique[:, None] - unique[None]) / size
    distance = np.sqrt(np.square(apart).sum(axis=2))
    np.fill_diagonal(distance, np.inf)
    distance.sort(axis=1)
    distance = distance[:, :-1]
    n = len(unique)
    logs = np.sort(_without_rounding(np.log(distance[:, 1] / distance[:, 0])))
    kept = min(int(n * (1 - 0.1)), n - 1)
    x, y = logs[:kept], -np.log1p(-np.arange(1, kept + 1) / n)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = {"twonn": float((x * y).sum() / np.square(x).sum()) if x.any() else math.inf}
    kept = int(n * (1 - 0.1))
    if kept >= 2:
        below = float(logs[:kept].sum() + (n - kept) * logs[kept - 1])
        values["twonn/censored"] = (kept - 1) / below if below else math.inf
    for k in SCALES:
        enough = distance.shape[1] >= 2 * k
        ratios = np.log(distance[:, 2 * k - 1] / distance[:, k - 1]) if enough else None
        values[f"gride/k{k}"] = (
            math.nan if ratios is None else maximum_likelihood(_without_rounding(ratios), k)
        )
    return values


def _without_rounding(log_ratios: Array) -> Array:
    """Equal spacings are equal but for the rounding of their distances."""
    return np.where(log_ratios < 1e-12, 0.0, log_ratios)


def maximum_likelihood(x: Array, k: int) -> float:
    """Find the root of Gride's likelihood equation between wide bounds."""
    n, total = len(x), float(x.sum())
    if total == 0:
        return math.inf
    if k == 1:
        return (n - 1) / total

    def score(d: float) -> float:
        rest = -np.expm1(-d * x)
        part = np.where(x > 0, x / np.where(x > 0, rest, 1), 1 / d).sum()
        return float((n - 1) / d + (k - 1) * part - (2 * k - 1) * total)

    low = n / total / 8
    high = low * 8
    while score(high) > 0:
        high *= 2
    return float(brentq(score, low, high, xtol=1e-300, rtol=1e-13))


# One input.


def check_rows(seed: int) -> list[str]:
    """Give one input to `geometry`; what is wrong with the answer."""
    rng = np.random.default_rng(seed)
    inputs, exact, words = draw_rows(rng)
    finite = np.isfinite(exact).all(axis=1)
    if finite.sum() < 3:
        try:
            geometry(**inputs)
        except ValueError as error:
            return [] if "at least 3 finite rows" in str(error) else [f"CRASH {words}: {error}"]
        return [f"WRONG {words}: fewer than 3 finite rows were measured"]
    rows = exact[finite]
    reach = float(np.abs(rows).max())
    exponent = math.frexp(reach)[1] if reach > 0 and not 1e-60 < reach < 1e60 else 0
    if reach > 0 and not 2.0**-200 <= reach <= 2.0**200:
        try:
            geometry(**inputs)
        except ValueError as error:
            return [] if "between 2^-200 and 2^200" in str(error) else [f"CRASH {words}: {error}"]
        return [f"WRONG {words}: rows of such a size were measured"]
    values = geometry(**inputs, metrics=OF_ROWS)
    rows = np.ldexp(rows, -exponent)
    labels = [
        np.asarray(inputs[name])[finite] if name in inputs else None
        for name in ("token_ids", "positions")
    ]
    expected = expected_of_rows(rows, *labels)
    spread = math.sqrt(expected["variance"])
    loss = np.finfo(float).eps * (np.abs(rows).max() / spread if spread else 1)
    wrong = compare(values, expected, exponent, 1e-8 + 1e3 * loss, expected["variance"])
    wrong += [f"{tag} is {values[tag]}, without a note" for tag in unnamed(values)]
    return [f"WRONG {words}: {'; '.join(wrong[:4])}"] if wrong else []


def compare(
    values: Mapping[str, float],
    expected: Mapping[str, float],
    exponent: int,
    tolerance: float,
    variance: float,
) -> list[str]:
    """Say which values are not those expected, where the rows were divided by 2^exponent."""
    wrong = []
    for tag, there in expected.items():
        if tag not in values:
            wrong.append(f"{tag} is not there")
            continue
        here, power = values[tag], DEGREES.get(tag, 0) * exponent
        if power and math.isfinite(there) and there:
            if abs(there) < 1e-12 * variance:  # a difference of equal values
                continue
            size = math.log2(abs(there)) + power
            if not -1021 < size < 1023:
                if math.isfinite(here) and -1030 < size < 1030:
                    continue
                if math.isfinite(here):
                    wrong.append(f"{tag} {here}, beyond float64")
                continue
            here = math.ldexp(here, -power) if math.isfinite(here) else here
        # A difference of two values is as exact as they are.
        least = tolerance * (variance if tag.endswith("between_variance") else 0)
        least += 1e-9 if tag in ("cosine", "sink_share") else 1e-12 * (tag in ("anisotropy",))
        if tag == "drift_norm":  # a sum of rows that can cancel
            least += 1e-13 * math.sqrt(expected["mean_square_norm"])
        slack = 1e4 if tag.startswith("norm_variance") else 1
        if tag.startswith(("twonn", "gride")) and math.isfinite(there):
            least += 50 * np.finfo(float).eps * there**2  # log(r2 / r1), of which it is the inverse
        if math.isfinite(there) != math.isfinite(here) or (
            math.isfinite(there)
            and not math.isclose(here, there, rel_tol=slack * tolerance, abs_tol=least)
        ):
            wrong.append(f"{tag} {here} not {there}")
    return wrong


def unnamed(values: Any) -> list[str]:
    """Find the values that are not finite and named in no note."""
    named = {word for note in values.notes for word in re.split(r"[,;:]* |: ", note)}
    missing = []
    for tag, value in values.items():
        if math.isfinite(value):
            continue
        names = tag.split("/")
        if not {names[0], f"{names[0]}/{names[-1]}"} & named:
            missing.append(tag)
    return missing


OF_ROWS = METRICS | select("participation_ratio")
OF_MODELS = select(
    "drift_norm", "variance", "cosine", "anisotropy", "attention_entropy", "attention_extremes",
    "attention_sink", "max_logit", "attention_entropy_normalised", "qk_cosine", "qk_dot",
    "query_mean_norm", "key_mean_norm",
)  # fmt: skip


def check_model(seed: int) -> list[str]:
    """Measure one small transformer; what is wrong with the answer."""
    draw: Draw = draw_model(seed)
    metrics = METRICS | OF_MODELS if seed % 7 == 0 else OF_MODELS
    before = [parameter.detach().clone() for parameter in draw.model.parameters()]
    values = measure(draw.model, draw.inputs, metrics=metrics, tokens=10_000, batches=1)
    wrong = [f"{tag} is {values[tag]}, without a note" for tag in unnamed(values)]
    missed = []
    if not all(map(torch.equal, before, draw.model.parameters())):
        wrong.append("the weights have changed")
    for tag, there in draw.expected.items():
        here = values.get(tag, math.nan)
        if math.isnan(there) and math.isnan(here):
            continue
        if (
            math.isnan(here)
            # A layer that is missing has no values of heads.
            and (tag in values or math.isnan(values.get(tag.partition("/head_")[0], 0.0)))
            and any(tag.split("/")[0] in note for note in values.notes)
        ):
            missed.append(tag)
        elif not math.isclose(here, there, rel_tol=draw.tolerance, abs_tol=draw.tolerance):
            wrong.append(f"{tag} {here} not {there}")
    found = [f"WRONG {draw.words}: {len(wrong)}: {'; '.join(wrong[:3])}"] if wrong else []
    return found + ([f"MISSED {draw.words}: {missed[:2]} {values.notes}"] if missed else [])


def campaign(
    name: str, check: Callable[[int], list[str]], count: int, seed: int, show: int
) -> None:
    """Run many inputs, and print the counts and what went wrong."""
    counts: Counter[str] = Counter()
    start = time.monotonic()

    def late(*_: object) -> None:
        raise HangError

    signal.signal(signal.SIGALRM, late)
    for one in range(seed, seed + count):
        if one > seed and (one - seed) % PROGRESS == 0:
            print(f"{one - seed} {name}: {_totals(counts)}", flush=True)
        signal.alarm(TIME_LIMIT)
        try:
            found = check(one)
        except HangError:
            found = [f"HANG: no answer in {TIME_LIMIT} s"]
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            found = [f"CRASH {type(error).__name__}: {error} ({place.name}:{place.lineno})"[:400]]
        finally:
            signal.alarm(0)
        for text in found:
            kind = text.split(" ", 1)[0].strip(":")
            counts[kind] += 1
            if counts[kind] <= show:
                print(f"{name} --seed {one}: {text}", flush=True)
    seconds = time.monotonic() - start
    print(f"{count} {name}: {_totals(counts)}; {seconds:.0f} s", flush=True)


def _totals(counts: Counter[str]) -> str:
    words = {"CRASH": "crashes", "HANG": "hangs", "WRONG": "wrong", "MISSED": "missed with a note"}
    return ", ".join(f"{counts[kind]} {text}" for kind, text in words.items())


def main(
    rows: Annotated[int, typer.Option(help="Inputs to geometry.")] = 0,
    models: Annotated[int, typer.Option(help="Models for measure.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the first input.")] = 0,
    show: Annotated[int, typer.Option(help="Findings of each kind that are printed.")] = 20,
) -> None:
    """Give random inputs to `geometry` and `measure`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if rows:
        campaign("rows", check_rows, rows, seed, show)
    if models:
        campaign("models", check_model, models, seed, show)


if __name__ == "__main__":
    typer.run(main)
