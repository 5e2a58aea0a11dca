"""Views: what metrics read of a layer, by name.

*Captured views* are what the window kept (`geomon.capture.snapshot`). *Derived views* are functions
whose parameter names are other views. A derived view is computed when it is first asked for and is
then kept, so that metrics share what is expensive. What is made of rows is there a second time of
the last token of each sequence, under its name with "last_" before it. Where a derived view has
several alternatives, the first one whose captured views are there is taken.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from geomon.capture.snapshot import CAPTURED, ROW_VIEWS, Layer
from geomon.kernels import spectrum as kernels
from geomon.kernels._blocks import require_rows
from geomon.kernels.angles import SequenceCosines, cosine, head_cosine, mean_rows, sequence_cosines
from geomon.kernels.attention import (
    AttentionRows,
    SequenceExtremes,
    attention_rows,
    extremes_of_scores,
    score_rows,
    sequence_extremes,
)
from geomon.kernels.dimension import HalfRatios, ratios_in_halves
from geomon.kernels.half_samples import (
    GroupSums,
    HalfMoments,
    HalfSamples,
    HeadScatter,
    anisotropy_differences,
    group_sums,
    half_samples,
    moments_of_halves,
    row_mean_differences,
    scatter_by_group,
    shares_of_halves,
    without_places,
)
from geomon.kernels.massive import ordinary_rows, share_beyond
from geomon.kernels.moments import drift_norm, mean_square_norm, squares_about_mean
from geomon.kernels.neighbourhoods import (
    LocalIsotropy,
    local_dimension,
    local_isotropy,
    local_isotropy_differences,
)
from geomon.kernels.neighbours import (
    Neighbours,
    ScaledRows,
    content_keys,
    first_of_each,
    nearest_among,
    scale_rows,
    unique_rows,
)
from geomon.kernels.neighbours import nearest as find_nearest
from geomon.kernels.scores import (
    QueryVariances,
    ScoreMoments,
    moments_of_scores,
    query_variances,
    score_moments,
)
from geomon.kernels.spectrum_summary import WHOLE_SIDE, SpectrumSummary, summarise_spectrum
from geomon.kernels.token_types import TokenTypes, token_types
from geomon.kernels.type_halves import TypeHalves, TypeMoments, type_moments

# Neighbours of every row; of the few rows that stand for the large scales, as many as those need.
NEAR = 16
FAR = 64
FAR_ROWS = 256

# Ranks at which the halves of the sequences are compared for the intervals of `gride`, by the scale
# that they stand for: by the neighbours of every row, and by those of the few rows. In a half about
# every second neighbour is left, so that rank k / 2 there reaches as far as rank k among all rows:
# where copies decide, dimensions at another distance scatter otherwise. At small k it is too noisy.
# Of 16 neighbours often fewer than 8 are in a half: in how many rows that is so differs between
# halves, and made the interval of k = 4 four times too wide; by rank 3 it is 1.7 times. By rank 2
# it covered .80 of padded documents, and k = 8 .68.
HALF_SCALES = {1: 1, 2: 2, 4: 3}
FAR_SCALES = {8: 4, 16: 8, 32: 16}
_FAR_IN_HALVES = 100  # of which about half are in a row's own half, where 2 x 16 are needed

# An odd number whose bits are spread, by which labels are mixed: about 2^63 over the golden ratio.
_MIXING = 5_700_357_409_661_599_241


def _duplicates(hidden: Tensor, unique_rows: Tensor) -> float:
    return 1 - len(unique_rows) / len(hidden)


def _drift_of_sums(row_sums: GroupSums) -> Tensor:
    return row_sums.mean[0].norm()


def _square_of_sums(row_sums: GroupSums) -> Tensor:
    return row_sums.square[0]


def _angle(hidden: Tensor) -> Tensor:
    return cosine(hidden)


def _angle_of_sums(hidden: Tensor, row_sums: GroupSums) -> Tensor:
    require_rows(hidden, at_least=2)
    return row_sums.cosine[0]


def _ordinary_hidden(hidden: Tensor, ordinary_rows: Tensor) -> Tensor:
    if bool(ordinary_rows.all()):
        return hidden
    return hidden.index_select(0, ordinary_rows.nonzero().squeeze(1))


def _scatters(
    hidden: Tensor, ordinary_rows: Tensor, ordinary_hidden: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    tokens, width = hidden.shape
    if width > min(tokens, WHOLE_SIDE):
        return None, None
    if len(ordinary_hidden) == tokens:
        found = kernels.scatter(hidden)
        return found, found
    if width > len(ordinary_hidden):
        return kernels.scatter(hidden), None
    return kernels.scatter_with(ordinary_hidden, hidden[~ordinary_rows])


def _scatter(scatters: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    return scatters[0]


def _spectrum_summary(hidden: Tensor, scatter: Tensor | None) -> SpectrumSummary:
    return summarise_spectrum(hidden, scatter)


def _spectrum(hidden: Tensor, spectrum_summary: SpectrumSummary) -> Tensor:
    if spectrum_summary.is_whole:
        return spectrum_summary.eigenvalues
    return kernels.spectrum(hidden)


def _ordinary_summary(
    hidden: Tensor,
    ordinary_hidden: Tensor,
    scatters: tuple[Tensor | None, Tensor | None],
    spectrum_summary: SpectrumSummary,
) -> SpectrumSummary:
    if len(ordinary_hidden) == len(hidden):
        return spectrum_summary
    return summarise_spectrum(ordinary_hidden, scatters[1])


def _ordinary_spectrum(ordinary_hidden: Tensor, ordinary_summary: SpectrumSummary) -> Tensor:
    if ordinary_summary.is_whole:
        return ordinary_summary.eigenvalues
    return kernels.spectrum(ordinary_hidden)


def _total_variance(squares_about_mean: Tensor) -> Tensor:
    return squares_about_mean.mean()


def _sink_variance(squares_about_mean: Tensor, ordinary_rows: Tensor) -> float:
    if bool(ordinary_rows.all()):
        return 0.0
    return float(share_beyond(squares_about_mean, ordinary_rows))


def _within(token_types: TokenTypes) -> Tensor:
    return token_types.within_variance


def _mean_query(projected_query: Tensor) -> Tensor:
    return mean_rows(projected_query)


def _mean_of_query_sums(query_sums: GroupSums) -> Tensor:
    return query_sums.mean


def _mean_key(projected_key: Tensor) -> Tensor:
    return mean_rows(projected_key)


def _mean_of_key_sums(key_sums: GroupSums) -> Tensor:
    return key_sums.mean


def _query_angles(projected_query: Tensor) -> Tensor:
    return head_cosine(projected_query)


def _angles_of_query_sums(query_sums: GroupSums) -> Tensor:
    return query_sums.cosine


def _key_angles(projected_key: Tensor) -> Tensor:
    return head_cosine(projected_key)


def _angles_of_key_sums(key_sums: GroupSums) -> Tensor:
    return key_sums.cosine


def _scaled_rows(hidden: Tensor, unique_rows: Tensor) -> ScaledRows:
    return scale_rows(hidden, unique_rows)


def _nearest(hidden: Tensor, unique_rows: Tensor, scaled_rows: ScaledRows) -> Neighbours:
    if len(unique_rows) < 2:
        return _without_neighbours(unique_rows)
    return find_nearest(hidden, k=NEAR, among=unique_rows, scaled=scaled_rows)


def _without_neighbours(rows: Tensor) -> Neighbours:
    """Say of rows that have no other beside them that it is infinitely far: they are counted."""
    distances = torch.full((len(rows), 1), torch.inf, dtype=torch.float64, device=rows.device)
    return Neighbours(distances, rows[:, None])


def _two_at_least(distances: Tensor) -> Tensor:
    """Add a second neighbour, infinitely far, where there is only one."""
    missing = max(0, 2 - distances.shape[1])
    return torch.nn.functional.pad(distances, (0, missing), value=torch.inf)


def _neighbours(nearest: Neighbours) -> Tensor:
    return _two_at_least(nearest.distances)


def _far_rows(unique_rows: Tensor) -> Tensor:
    count = min(len(unique_rows), FAR_ROWS)
    order = torch.arange(count, dtype=torch.int64, device=unique_rows.device)
    # In integers: nothing is rounded.
    return unique_rows[order * (len(unique_rows) - 1) // max(count - 1, 1)]


def _far_nearest(
    hidden: Tensor, far_rows: Tensor, unique_rows: Tensor, scaled_rows: ScaledRows
) -> Neighbours:
    if len(unique_rows) < 2:
        return _without_neighbours(unique_rows)
    return find_nearest(
        hidden, k=_FAR_IN_HALVES, of=far_rows, among=unique_rows, scaled=scaled_rows
    )


def _far_neighbours(far_nearest: Neighbours) -> Tensor:
    return _two_at_least(far_nearest.distances[:, :FAR])


def _members(far_nearest: Neighbours) -> Tensor:
    return far_nearest.indices[:, :FAR]


def _local_dimensions(hidden: Tensor, members: Tensor) -> Tensor:
    return local_dimension(hidden, members)


def _local_shapes(hidden: Tensor, members: Tensor) -> LocalIsotropy:
    return local_isotropy(hidden, members)


def _rounding(mean_square: Tensor, neighbours: Tensor, precision: float) -> float:
    # Each number is off by up to half its spacing, evenly: variance spacing^2 / 12, and a
    # difference of two has twice that.
    noise = precision * mean_square.sqrt() / 6**0.5
    spacing = neighbours[:, 0].median()
    return float(torch.where(spacing.isfinite(), noise / spacing, torch.nan))


def _distinct_by_sequence(
    hidden: Tensor, unique_rows: Tensor, token_ids: Tensor, positions: Tensor, sequences: Tensor
) -> Tensor:
    # Chosen by the sequence, the same row stands for its pair at every layer and in every number
    # format, and in a probe at every step. The pair is mixed in, so that no sequence leads in all.
    key = torch.zeros_like(sequences, dtype=torch.int64)
    for labels in (token_ids, positions, sequences):
        key = (key ^ labels) * _MIXING  # 64 bits, the rest is cut off
        key = key ^ (key >> 29)
    return _distinct(hidden, unique_rows, token_ids, positions, key)


def _distinct_by_content(
    hidden: Tensor, unique_rows: Tensor, token_ids: Tensor, positions: Tensor
) -> Tensor:
    return _distinct(hidden, unique_rows, token_ids, positions, None)


def _distinct(
    hidden: Tensor, unique_rows: Tensor, token_ids: Tensor, positions: Tensor, key: Tensor | None
) -> Tensor:
    # One number for each pair: sorting pairs costs twenty times as much. Labels are numbered first,
    # so that no product is beyond 64 bits.
    token, position = (
        torch.unique(labels[unique_rows], return_inverse=True)[1]
        for labels in (token_ids, positions)
    )
    _, pair, count = torch.unique(
        token * len(unique_rows) + position, return_inverse=True, return_counts=True
    )
    alone = count[pair] == 1
    # Which row stands for its pair must not depend on the order of the rows: the first by a key,
    # and where there is none, or rows of one sequence have the same, by content.
    tied, pair = unique_rows[~alone], pair[~alone]
    order = content_keys(hidden, tied).argsort()
    if key is not None:
        order = order[key[tied[order]].argsort(stable=True)]
    first = tied[order[first_of_each(pair[order])]]
    return torch.cat([unique_rows[alone], first]).sort().values


def _distinct_alone(
    hidden: Tensor,
    distinct: Tensor,
    unique_rows: Tensor,
    scaled_rows: ScaledRows,
    known_halves: HalfSamples,
) -> Neighbours | None:
    # Where distinct rows are few, few of a row's neighbours are distinct rows. They are searched
    # among themselves, which costs a quarter of the search among all, or less. Halves need so many.
    few = 2 <= len(distinct) < len(unique_rows) / 2
    if not few or len(known_halves.first) == 0:
        return None
    return find_nearest(hidden, NEAR, among=distinct, scaled=scaled_rows)


def _distinct_nearest(
    nearest: Neighbours,
    hidden: Tensor,
    distinct: Tensor,
    unique_rows: Tensor,
    scaled_rows: ScaledRows,
    distinct_alone: Neighbours | None,
) -> Neighbours:
    if len(distinct) < 2:
        return _without_neighbours(distinct)
    if distinct_alone is not None:
        return Neighbours(*(found[:, :2] for found in distinct_alone))
    return nearest_among(nearest, hidden, distinct, k=2, among=unique_rows, scaled=scaled_rows)


def _distinct_neighbours(distinct_nearest: Neighbours) -> Tensor:
    return _two_at_least(distinct_nearest.distances)


def _labels_by_id(token_ids: Tensor, positions: Tensor) -> Tensor:
    return torch.stack([token_ids, positions], dim=1)


def _labels_by_place(positions: Tensor) -> Tensor:
    return positions[:, None]


def _halves(sequences: Tensor) -> HalfSamples:
    return half_samples(sequences)


def _half_isotropy(
    hidden: Tensor, members: Tensor, far_rows: Tensor, halves: HalfSamples
) -> LocalIsotropy:
    return local_isotropy_differences(hidden, members, far_rows, halves)


def _no_halves(hidden: Tensor) -> HalfSamples:
    return half_samples(hidden.new_zeros(len(hidden), dtype=torch.int64))


def _sums_of_both(
    hidden: Tensor, ordinary_rows: Tensor, ordinary_hidden: Tensor, halves: HalfSamples
) -> tuple[GroupSums, GroupSums]:
    if len(ordinary_hidden) == len(hidden):
        found = group_sums(hidden[:, None], halves)
        return found, found
    # Added to those of ordinary rows, those of massive rows leave all their digits.
    ordinary, massive = (
        group_sums(rows[:, None], halves._replace(group=halves.group[chosen]))
        for rows, chosen in (
            (ordinary_hidden, ordinary_rows),
            (hidden[~ordinary_rows], ~ordinary_rows),
        )
    )
    return GroupSums(*(one + other for one, other in zip(ordinary, massive, strict=True))), ordinary


def _row_sums(sums_of_both: tuple[GroupSums, GroupSums]) -> GroupSums:
    return sums_of_both[0]


def _half_anisotropy(
    hidden: Tensor,
    squares_about_mean: Tensor,
    row_sums: GroupSums,
    halves: HalfSamples,
    scatter: Tensor | None,
) -> Tensor:
    return anisotropy_differences(hidden, squares_about_mean, row_sums, halves, scatter)


def _half_shares(
    hidden: Tensor, row_sums: GroupSums, halves: HalfSamples, scatter: Tensor | None
) -> Tensor:
    if scatter is None:
        return hidden.new_empty(0, 1, dtype=torch.float64)
    return shares_of_halves(hidden, row_sums, halves, scatter)


def _half_moments(
    squares_about_mean: Tensor, row_sums: GroupSums, halves: HalfSamples
) -> HalfMoments:
    return moments_of_halves(squares_about_mean, row_sums, halves)


def _half_ratios(
    nearest: Neighbours, unique_rows: Tensor, halves: HalfSamples
) -> dict[int, HalfRatios]:
    ranks = sorted(set(HALF_SCALES.values()))
    return dict(zip(ranks, ratios_in_halves(*nearest, unique_rows, halves, ranks), strict=True))


def _far_half_ratios(
    far_nearest: Neighbours, far_rows: Tensor, halves: HalfSamples
) -> dict[int, HalfRatios]:
    found = ratios_in_halves(*far_nearest, far_rows, halves, [*FAR_SCALES.values()])
    return dict(zip(FAR_SCALES.values(), found, strict=True))


def _distinct_half_ratios(
    nearest: Neighbours,
    hidden: Tensor,
    distinct: Tensor,
    unique_rows: Tensor,
    halves: HalfSamples,
    distinct_alone: Neighbours | None,
) -> HalfRatios:
    if distinct_alone is not None:
        return ratios_in_halves(*distinct_alone, distinct, halves)[0]
    places = torch.searchsorted(unique_rows, distinct)
    is_distinct = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    is_distinct[distinct] = True
    indices = nearest.indices[places]
    distances = nearest.distances[places].masked_fill(~is_distinct[indices], torch.inf)
    return ratios_in_halves(distances, indices, distinct, halves)[0]


def _type_moments(hidden: Tensor, token_ids: Tensor, halves: HalfSamples) -> TypeMoments:
    return type_moments(hidden, token_ids, halves)


def _types_of_moments(type_moments: TypeMoments) -> TokenTypes:
    return type_moments.types


def _type_halves(type_moments: TypeMoments) -> TypeHalves:
    return type_moments.halves


def _sequence_cosines(hidden: Tensor, sequences: Tensor) -> SequenceCosines:
    return sequence_cosines(hidden, sequences)


def _query_halves(query_sequences: Tensor) -> HalfSamples:
    return half_samples(query_sequences)


def _key_halves(key_sequences: Tensor) -> HalfSamples:
    return half_samples(key_sequences)


def _query_sums(projected_query: Tensor, query_halves: HalfSamples) -> GroupSums:
    return group_sums(projected_query, query_halves)


def _key_sums(projected_key: Tensor, key_halves: HalfSamples) -> GroupSums:
    return group_sums(projected_key, key_halves)


def _query_scatter(projected_query: Tensor, query_halves: HalfSamples) -> HeadScatter:
    return scatter_by_group(projected_query, query_halves)


def _query_scatter_alone(projected_query: Tensor) -> HeadScatter:
    return scatter_by_group(projected_query, _no_halves(projected_query))


def _key_scatter(projected_key: Tensor, key_halves: HalfSamples) -> HeadScatter:
    return scatter_by_group(projected_key, key_halves)


def _key_scatter_alone(projected_key: Tensor) -> HeadScatter:
    return scatter_by_group(projected_key, _no_halves(projected_key))


def _attention_sequences(query: Tensor) -> Tensor:
    sequences, _, queries = query.shape[:3]
    order = torch.arange(sequences, dtype=torch.int64, device=query.device)
    return order.repeat_interleave(queries)


def _score_sequences(scores: Tensor) -> Tensor:
    return _attention_sequences(scores)


def _attention_halves(attention_sequences: Tensor, visible: Tensor) -> HalfSamples:
    real = visible.any(dim=3).any(dim=1)  # padding among the queries sees no key
    sequences = int(attention_sequences[-1]) + 1
    counted = real.expand(sequences, len(attention_sequences) // sequences)
    return half_samples(attention_sequences, counted.flatten())


def _attention_differences(
    attention: AttentionRows, attention_sequences: Tensor, attention_halves: HalfSamples
) -> dict[str, Tensor]:
    """Compare means of attention rows on halves: [ways, heads] of each.

    The positions of the sampled queries are the same at every draw, and how many keys a row sees
    decides much of its value: what rows have by it is taken off.
    """
    visible, heads = attention.visible, len(attention.visible)

    def compare(values: dict[str, Tensor], outcomes: int) -> dict[str, Tensor]:
        # Values of all kinds as if each were of heads of its own: their rows are the same.
        chosen = (visible >= outcomes).repeat(len(values), 1)
        places = visible.repeat(len(values), 1)
        own = without_places(
            torch.cat([*values.values()]), chosen, places, attention_sequences, attention_halves
        )
        found = row_mean_differences(own, chosen, attention_halves).split(heads, dim=1)
        return dict(zip(values, found, strict=True))

    of_two = {
        "entropy_normalised": attention.entropy / visible.log(),
        "maximum": attention.maximum,
        "minimum": attention.minimum,
        "first": attention.first,
    }
    # A row of one outcome has an entropy, 0, and no other value.
    if bool((visible == 1).any()):
        return compare({"entropy": attention.entropy}, 1) | compare(of_two, 2)
    return compare({"entropy": attention.entropy} | of_two, 2)


def _repeated(hidden: Tensor, distinct: Tensor) -> float:
    return 1 - len(distinct) / len(hidden)


def _attention(
    query: Tensor, key: Tensor, visible: Tensor, scale: float, bias: Tensor | None,
    softcap: float | None, sink: Tensor | None,
) -> AttentionRows:  # fmt: skip
    return attention_rows(query, key, visible, scale, bias, softcap, sink)


def _sequence_extremes(
    query: Tensor, key: Tensor, visible: Tensor, scale: float, bias: Tensor | None,
    softcap: float | None, sink: Tensor | None,
) -> SequenceExtremes:  # fmt: skip
    return sequence_extremes(query, key, visible, scale, bias, softcap, sink)


def _score_moments(
    query: Tensor, key: Tensor, visible: Tensor, scale: float, bias: Tensor | None,
    softcap: float | None,
) -> ScoreMoments:  # fmt: skip
    return score_moments(query, key, visible, scale, bias, softcap)


def _query_variances(
    query: Tensor, key: Tensor, visible: Tensor, attention_halves: HalfSamples
) -> QueryVariances:
    return query_variances(query, key, visible, attention_halves)


DERIVED: dict[str, Callable[..., Any] | tuple[Callable[..., Any], ...]] = {
    "ordinary_rows": ordinary_rows,  # False for the few rows of massive norm
    "ordinary_summary": _ordinary_summary,  # spectrum_summary without the rows of massive norm
    "ordinary_spectrum": _ordinary_spectrum,  # spectrum without them
    "sink_variance": _sink_variance,  # share of the variance that those rows carry
    "spectrum": _spectrum,  # all eigenvalues of the centred covariance, descending, [rank]
    "ordinary_hidden": _ordinary_hidden,  # rows without those of massive norm
    "scatters": _scatters,  # scatter of all rows and of ordinary ones, of which most is shared
    "scatter": _scatter,  # covariance times the tokens; None in layers of more than 1,024 columns
    "spectrum_summary": _spectrum_summary,  # what metrics read of them: SpectrumSummary
    "squares_about_mean": squares_about_mean,  # squared distance of each row from the mean
    "total_variance": _total_variance,  # around the mean of all rows
    "type_moments": _type_moments,  # moments of all rows of each token type and of halves
    # Count, norm of the mean and scatter of the rows of each token type.
    "token_types": (_types_of_moments, token_types),
    "within": _within,  # variance around the mean of each row's token type
    "mean_query": (_mean_of_query_sums, _mean_query),  # of each head, [heads, head width]
    "mean_key": (_mean_of_key_sums, _mean_key),  # of each key head, [key heads, head width]
    "query_angles": (_angles_of_query_sums, _query_angles),  # mean cosine of each head, [heads]
    "key_angles": (_angles_of_key_sums, _key_angles),  # the same of the keys
    "unique_rows": unique_rows,  # index of one row for each distinct content
    "duplicates": _duplicates,  # share of the rows that copy another
    "scaled_rows": _scaled_rows,  # unique rows made ready for several searches
    "nearest": _nearest,  # neighbours among unique rows: distances and who they are
    "neighbours": _neighbours,  # distances among unique rows, ascending, [tokens, k]
    "far_rows": _far_rows,  # index of a few unique rows, evenly spread
    "far_nearest": _far_nearest,  # their neighbours to a higher rank
    "far_neighbours": _far_neighbours,  # distances to those
    "members": _members,  # index of the rows near each of the few rows, itself not among them
    "local_dimensions": _local_dimensions,  # TwoNN of each of these neighbourhoods
    "local_shapes": _local_shapes,  # anisotropy and mean cosine of each about its own mean
    "rounding": _rounding,  # distance that rounding alone makes, over the median nearest distance
    # Index of one unique row for each (token id, position).
    "distinct": (_distinct_by_sequence, _distinct_by_content),
    "distinct_alone": _distinct_alone,  # more neighbours among distinct rows, where these are few
    "distinct_nearest": _distinct_nearest,  # the two nearest distinct rows of each of them
    "distinct_neighbours": _distinct_neighbours,  # distances to those
    "repeated": _repeated,  # share of the rows that repeat a (token id, position)
    "attention": (_attention, score_rows),  # reduced softmax rows: AttentionRows
    "token_labels": (_labels_by_id, _labels_by_place),  # numbers that tell tokens apart
    "halves": _halves,  # ways of cutting the rows into halves of whole sequences
    "known_halves": (_halves, _no_halves),  # the same; no way where the sequences are not known
    "sums_of_both": _sums_of_both,  # of all rows and of ordinary ones, from one pass
    "row_sums": _row_sums,  # sums of the rows and their directions over groups of sequences
    "half_moments": _half_moments,  # norm of the mean and variance of each half: HalfMoments
    "half_anisotropy": _half_anisotropy,  # differences of the anisotropy between halves
    "half_shares": _half_shares,  # shares of the variance along directions, in each half
    "half_isotropy": _half_isotropy,  # the same of the isotropy of neighbourhoods
    "half_ratios": _half_ratios,  # ratios of distances within each row's half, by rank
    "far_half_ratios": _far_half_ratios,  # the same at larger scales, of a few rows
    "distinct_half_ratios": _distinct_half_ratios,  # the same of distinct rows
    "query_halves": _query_halves,  # ways of cutting the projected queries
    "key_halves": _key_halves,  # the same of the keys
    "query_sums": _query_sums,  # sums of the projected queries over groups of sequences
    "key_sums": _key_sums,  # the same of the keys
    "attention_sequences": (_attention_sequences, _score_sequences),  # of each attention row
    "attention_halves": _attention_halves,  # ways of cutting the attention rows
    "attention_differences": _attention_differences,  # of means of those between halves
    "score_moments": (_score_moments, moments_of_scores),  # of each query: ScoreMoments
    "query_variances": _query_variances,  # of scores of mean queries and of all: QueryVariances
    "sequence_extremes": (_sequence_extremes, extremes_of_scores),  # SequenceExtremes
    # Products of the centred queries of each head, summed: HeadScatter.
    "query_scatter": (_query_scatter, _query_scatter_alone),
    "key_scatter": (_key_scatter, _key_scatter_alone),  # the same of the keys
    "drift": (_drift_of_sums, drift_norm),  # norm of the mean row
    "mean_square": (_square_of_sums, mean_square_norm),  # mean squared norm of the rows
    "angle": (_angle_of_sums, _angle),  # mean cosine over all pairs of rows
    "sequence_cosines": _sequence_cosines,  # sums of directions by sequence: SequenceCosines
    "type_halves": _type_halves,  # moments of the token types in halves of the sequences
}


# Beginning of the names of views of the last token of each sequence.
_LAST = "last_"


def alternatives(name: str) -> tuple[Callable[..., Any], ...]:
    """List the functions that make a derived view, the preferred one first.

    Args:
        name: Name of a derived view.
    """
    made = DERIVED[name]
    return made if isinstance(made, tuple) else (made,)


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """List the views that a function reads: its parameters without a default.

    Args:
        function: A metric, or a function that makes a derived view.
    """
    try:
        return _parameters(function)
    except TypeError:  # an object of the user's own that cannot be hashed
        return _parameters.__wrapped__(function)


@functools.lru_cache(maxsize=1024)  # asked for every metric, layer and view of every reading
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind in kinds
    )


def captured_views(names: Iterable[str]) -> set[str]:
    """List the captured views from which the named views are made, by any alternative.

    Args:
        names: Names of views, captured or derived.

    Raises:
        KeyError: A name is no view.
    """
    return set().union(*map(_captured_views, names))


@functools.lru_cache(maxsize=1024)  # asked for every metric of every layer
def _captured_views(name: str) -> frozenset[str]:
    if name in CAPTURED:
        return frozenset([name])
    if name in DERIVED:
        ways = alternatives(name)
        return frozenset(captured_views(view for way in ways for view in parameters(way)))
    return frozenset(f"{_LAST}{leaf}" for leaf in captured_views([_of_rows(name)]))


def can_be_made(names: Iterable[str], captured: Iterable[str]) -> bool:
    """Whether views can all be made of the captured ones that are there, by some alternative.

    Args:
        names: Names of views, captured or derived.
        captured: Names of the captured views that are there.

    Raises:
        KeyError: A name is no view.
    """
    there = frozenset(captured)
    return all(_can_be_made(name, there) for name in names)


@functools.lru_cache(maxsize=4096)  # asked for every view of every layer
def _can_be_made(name: str, captured: frozenset[str]) -> bool:
    if name in CAPTURED:
        return name in captured
    if name in DERIVED:
        return any(can_be_made(parameters(way), captured) for way in alternatives(name))
    last = {view.removeprefix(_LAST) for view in captured if CAPTURED[view] == "last"}
    return can_be_made([_of_rows(name)], last)


def is_view(name: str) -> bool:
    """Return whether there is a view of that name.

    Args:
        name: Any name; "last_spectrum", say, is the spectrum of the last tokens.
    """
    known = name in CAPTURED or name in DERIVED
    return known or (name.startswith(_LAST) and has_last(name.removeprefix(_LAST)))


def has_last(name: str) -> bool:
    """Return whether a view is made of rows alone, so that the last tokens have it too.

    Args:
        name: Name of a view.
    """
    if name not in CAPTURED and name not in DERIVED:
        return False
    return {CAPTURED[view] for view in captured_views([name])} == {"hidden"}


def _of_rows(name: str) -> str:
    """Name the view of all rows that a view of the last tokens stands for.

    Raises:
        KeyError: There is no view of that name.
    """
    if not is_view(name):
        raise KeyError(name)
    return name.removeprefix(_LAST)


class MissingViewError(LookupError):
    """A view was not captured at this layer, or not enough of it; the message says why."""


class LayerViews:
    """The views of one layer, or of some of its rows: derived ones are computed once.

    Args:
        layer: The layer with its captured views.
        prefix: Beginning of the names of these views outside: "last_" for those of last tokens.
    """

    def __init__(self, layer: Layer, prefix: str = "") -> None:
        self._layer = layer
        self._prefix = prefix
        self._derived: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return the view called `name`, computing it if it is a derived one.

        Raises:
            MissingViewError: The view is made of something that was not captured.
            KeyError: There is no view of that name.
        """
        captured = self._layer.captured
        if name in captured:
            return captured[name]
        if name in CAPTURED:
            reason = self._layer.missing.get(name, "it was not seen")
            raise MissingViewError(f"'{self._prefix}{name}' is missing: {reason}")
        if name not in DERIVED:
            return self._last[_of_rows(name)]
        if name not in self._derived:
            self._derived[name] = self.apply(self._function_for(name))
        return self._derived[name]

    @functools.cached_property
    def _last(self) -> "LayerViews":
        """The views of the last tokens, under the names that those of all rows have."""
        captured, missing = (
            {_of_rows(name): value for name, value in views.items() if CAPTURED[name] == "last"}
            for views in (self._layer.captured, self._layer.missing)
        )
        return LayerViews(replace(self._layer, captured=captured, missing=missing), _LAST)

    def has(self, name: str) -> bool:
        """Return whether a view of these rows was captured, or has been computed already.

        Args:
            name: Name of a view.
        """
        return name in self._layer.captured or name in self._derived

    def apply(self, function: Callable[..., Any]) -> Any:
        """Call a function with the views that its parameters name.

        Args:
            function: A metric, or a function that makes a derived view.

        Raises:
            MissingViewError: One of the views is made of something that was not captured.
        """
        return function(*(self[name] for name in parameters(function)))

    def apply_to_copies(self, function: Callable[..., Any]) -> Any:
        """Call a function of the user's with copies of the views that its parameters name.

        It may change them in place, and other metrics read the same views, as does a second
        measurement of a layer (after a trial of its cost, say).

        Args:
            function: A metric.

        Raises:
            MissingViewError: One of the views is made of something that was not captured.
        """
        return function(*(_copied(self[name]) for name in parameters(function)))

    def _function_for(self, name: str) -> Callable[..., Any]:
        """The first alternative that can be made of what was captured; else the preferred one."""
        functions = alternatives(name)
        if len(functions) == 1:
            return functions[0]
        there = self._layer.captured.keys()
        return next((f for f in functions if can_be_made(parameters(f), there)), functions[0])


def _copied(view: Any) -> Any:
    """A view whose tensors are copies; what is neither a tensor nor a tuple of them is itself."""
    if isinstance(view, Tensor):
        return view.clone()
    if isinstance(view, tuple):
        parts = map(_copied, view)
        return view._make(parts) if hasattr(view, "_make") else tuple(parts)
    return view


def split_rows(layer: Layer, rows: int, count: int) -> list[LayerViews]:
    """Cut the rows of a layer into splits of equal size; views that are not of rows are shared.

    Args:
        layer: The layer with its captured views.
        rows: Number of rows in one split. Fewer rows than that make one split; a remainder is left
            out.
        count: Largest number of splits.
    """
    hidden = layer.captured.get("hidden")
    if hidden is None:
        return [LayerViews(layer)]
    full = max(1, min(count, len(hidden) // rows))
    cuts = [slice(start * rows, (start + 1) * rows) for start in range(full)]
    return [
        LayerViews(
            replace(
                layer,
                captured={k: v[cut] if k in ROW_VIEWS else v for k, v in layer.captured.items()},
            )
        )
        for cut in cuts
    ]
