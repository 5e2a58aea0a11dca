"""Kernels and metrics in numpy and float64, as textbooks define them.

Nothing of geomon is imported here: this is the reference that it is held against.
"""

import math
from fractions import Fraction

import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import entr, softmax

NAN = math.nan


def norms(x):
    return np.linalg.norm(x, axis=1)


def centred(x):
    return x - x[0] - (x - x[0]).mean(axis=0)


def squares(x):
    """Square the distance of each row from the mean."""
    return np.square(centred(x)).sum(axis=1)


def eigenvalues(x):
    return np.linalg.svd(centred(x), compute_uv=False) ** 2 / len(x)


def shares(x):
    values = eigenvalues(x)
    return values / values.sum() if values.sum() > 0 else np.full(1, NAN)


def effective_rank(x):
    p = shares(x)
    p = p[~(p <= 0)]
    return np.exp(-(p * np.log(p)).sum())


def participation_ratio(x):
    return 1 / np.square(shares(x)).sum()


def fitted_law(x):
    """Exponent and R^2 of the fit over ranks 11 to 100, or 4/5 of the ranks, weights 1 / rank."""
    values = eigenvalues(x)
    rank = np.arange(11, min(100, 4 * (values > 1e-13 * values[0]).sum() // 5) + 1)
    y = np.log(values[rank[0] - 1 : rank[-1]])
    line = np.polyfit(np.log(rank), y, 1, w=rank**-0.5)
    left = np.average((y - np.polyval(line, np.log(rank))) ** 2, weights=1 / rank)
    about = y - np.average(y, weights=1 / rank)
    return np.array([-line[0], 1 - left / np.average(about**2, weights=1 / rank)])


def mean_cosine(x, pairs=None):
    """Over all pairs of rows that have a direction, or over those that a matrix marks."""
    pairs = np.ones((len(x), len(x)), bool) if pairs is None else pairs
    length = norms(x)
    unit = x[length > 0] / length[length > 0, None]
    chosen = pairs[length > 0][:, length > 0] & ~np.eye(len(unit), dtype=bool)
    return (unit @ unit.T)[chosen].mean() if chosen.any() else NAN


def are_ordinary(x):
    """Not ten times as far from the median row as the median row is."""
    middle = (len(x) - 1) // 2
    distance = norms(x - np.sort(x, axis=0)[middle])
    return distance <= 10 * np.sort(distance)[middle]


def massive_share(x):
    return squares(x)[~are_ordinary(x)].sum() / squares(x).sum()


def distances(x):
    """Sort the distances of each row to all others, ascending."""
    apart = cdist(x, x)
    np.fill_diagonal(apart, -1)
    return np.sort(apart, axis=1)[:, 1:]


def ratios(near, discard):
    """Logarithms of the ratios of two distances, ascending, and how many of them are kept."""
    logs = np.sort(np.log(near[:, 1] / near[:, 0]))
    logs[logs < 1e-12] = 0.0  # equal spacings are equal but for the rounding of their distances
    return logs, len(logs) - math.ceil(Fraction(discard) * len(logs))


def twonn(near, discard="0.1"):
    """The fit through 0 without a share of the largest ratios of two distances."""
    if len(near) < 3:
        return NAN
    logs, kept = ratios(near, discard)
    kept = min(kept, len(near) - 1)
    x, y = logs[:kept], -np.log1p(-np.arange(1, kept + 1) / len(near))
    return (x * y).sum() / np.square(x).sum() if x.any() else math.inf if kept else NAN


def margin(without):
    """Half width of the 95 % interval, from the values without each of 8 groups of sequences."""
    return 2.3646243 * np.sqrt(7 / 8 * np.square(without - np.mean(without)).sum())


def by_type(x, ids):
    """Number of rows, squared norm of the mean and variance of each type of token."""
    parts = [x[ids == number] for number in np.unique(ids)]
    mean = [np.square(part.mean(axis=0)).sum() for part in parts]
    return (np.array(each) for each in ([*map(len, parts)], mean, [p.var(0).sum() for p in parts]))


def within_variance(x, ids):
    count, _, spread = by_type(x, ids)
    return (count * spread).sum() / (len(x) - len(count))


def fitted_types(x, ids):
    """The line of V on M, V with 1 / (n - 1) and M + V = Q, over types of ten rows or more."""
    count, mean, spread = by_type(x, ids)
    count, mean, spread = (part[count >= 10] for part in (count, mean, spread))
    unbiased = spread * count / (count - 1)
    own = mean + spread - unbiased
    slope, square = np.polyfit(own, unbiased, 1)[0], np.corrcoef(own, unbiased)[0, 1] ** 2
    variation = (mean + spread).std() / (mean + spread).mean()
    return np.array([slope, square, len(count), count.sum() / len(x), variation])


# -- metrics, by tag: of the views of a layer, with the names that geomon gives them ---------------


def of_updates(before, x):
    """Compute the metrics of a layer's update, from its rows and the same rows one layer before."""
    update = x - before
    norm = norms(before) * norms(update)
    products = (before * update).sum(axis=1)[norm > 0]
    growth = math.sqrt(np.square(x).sum() / np.square(before).sum())
    return {"norm_growth": growth, "residual_cosine": (products / norm[norm > 0]).mean()}


def of_rows(views):
    """Compute the metrics of hidden states and token ids."""
    x, ids = views["hidden"], views["token_ids"]
    total, square = squares(x).mean(), np.square(x).sum(axis=1).mean()
    within, mean = within_variance(x, ids), np.square(x.mean(axis=0)).sum()
    found = {
        "anisotropy": shares(x)[0], "massive_share": massive_share(x),
        "anisotropy_without_massive": shares(x[are_ordinary(x)])[0],
        "effective_rank": effective_rank(x), "participation_ratio": participation_ratio(x),
        "alpha": fitted_law(x)[0], "alpha/r_squared": fitted_law(x)[1],
        "cosine": mean_cosine(x), "cosine_centred": mean_cosine(centred(x)),
        "drift_norm": math.sqrt(mean), "variance": total, "mean_square_norm": square,
        "within_variance": within, "variance_shares": within / total,
        "variance_shares/mean": mean / square, "variance_shares/within": within / square,
        "variance_shares/between": (total - within) / square,
        "variance_shares/between_variance": total - within,
    }  # fmt: skip
    names = ("", "/r_squared", "/types", "/coverage", "/q_variation")
    for name, value in zip(names, fitted_types(x, ids), strict=True):
        found[f"norm_variance_slope{name}"] = value
    return found


def of_neighbours(x):
    """Compute the metrics of distances between distinct rows; local ones use a row's 64 nearest."""
    x = np.unique(x, axis=0)
    near = distances(x)
    parts = [centred(x[np.argsort(norms(x - row), kind="stable")[1:65]]) for row in x]
    inner = [twonn(distances(part)) for part in parts]
    return {
        "twonn": twonn(near), "twonn/n": len(x),
        "gride/k1": (len(x) - 1) / np.log(near[:, 1] / near[:, 0]).sum(),
        "local_dimension": np.mean(inner), "local_dimension/spread": np.std(inner, ddof=1),
        "local_anisotropy": np.mean([shares(part)[0] for part in parts]),
    }  # fmt: skip


def of_heads(query, key):
    """Compute the metrics of projected queries and keys, [rows, heads, width], by head."""
    q, k = query.mean(axis=0), key.mean(axis=0)
    facing = k.repeat(len(q) // len(k), axis=0)
    dots = (q * facing).sum(axis=1)
    found = {
        "qk_dot": dots, "qk_cosine": dots / norms(q) / norms(facing),
    }  # fmt: skip
    for name, rows in (("query", query), ("key", key)):
        heads = rows.swapaxes(0, 1)
        found[f"{name}_mean_norm"] = norms(rows.mean(axis=0))
        found[f"{name}_cosine"] = np.array([mean_cosine(head) for head in heads])
        found[f"{name}_anisotropy"] = np.array([shares(head)[0] for head in heads])
    return found


def of_attention(views):
    """Compute the metrics of attention by head, over the queries that see a key."""
    query, key = views["query"], views["key"]
    key = key.repeat(query.shape[1] // key.shape[1], axis=1)
    products = query @ key.swapaxes(2, 3)
    seen = np.broadcast_to(views["visible"], products.shape)
    cap, bias, sinks = views["softcap"], views["bias"], views["sink"]
    scores = views["scale"] * products
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    scores = scores if bias is None else scores + bias
    found = {}
    for head, (keys, weighed) in enumerate(
        zip(seen.swapaxes(0, 1), key.swapaxes(0, 1), strict=True)
    ):
        common = weighed @ query[:, head][keys.any(axis=2)].mean(axis=0)
        rows, of_sequences = [], [[] for _ in keys]
        for one, row in np.argwhere(keys.any(axis=2)):
            own = scores[one, head, row, keys[one, row]]
            outcomes = own if sinks is None else np.append(own, sinks[head])
            outcomes = softmax(outcomes)
            weights, several = np.sort(outcomes[: len(own)]), len(own) > 1
            choice = 1.0 if len(outcomes) > 1 else NAN  # a row without one is left out
            of_sequences[one] += [*weights] * several
            rows.append({
                "attention_entropy": entr(outcomes).sum(),
                "attention_entropy_normalised": choice * entr(outcomes).sum()
                / max(np.log(len(outcomes)), 1e-9),
                "attention_sink": choice * (outcomes[0] + outcomes[len(own) :].sum()),
                "attention_extremes/max": choice * weights[-1],
                "attention_extremes/min": choice * weights[0],
                "attention_extremes/median": weights[(len(own) - 1) // 2] if several else NAN,
                "score_mean": own.mean(), "score_spread": own.var() if several else NAN,
                "made": common[one, keys[one, row]].var(),
                "whole": products[one, head, row, keys[one, row]].var(),
            })  # fmt: skip
        values = {name: np.nanmean([row[name] for row in rows]) for name in rows[0]}
        values["score_spread"] **= 0.5
        values["mean_query_share"] = values.pop("made") / values.pop("whole")
        for name, share in (("max", 1.0), ("median", 0.5), ("min", 0.0)):
            values[f"attention_extremes/sequence_{name}"] = np.mean(
                [sorted(part)[int(share * (len(part) - 1))] for part in of_sequences]
            )
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: np.array(by_head) for name, by_head in found.items()}
