import functools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import geomon.kernels.neighbours
from benchmarks.exactness import KINDS
from geomon.kernels import certified, quantised
from geomon.kernels._candidates import distances_to
from geomon.kernels._eight_bits import is_exact
from geomon.kernels.neighbours import nearest, scale_rows
from geomon.kernels.quantised import search

faiss = pytest.importorskip("faiss")
if not is_exact(256):
    pytest.skip("8-bit integers are not multiplied exactly here", allow_module_level=True)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def decaying(tokens, width, *, power=0.5, seed=0):
    return (normal(tokens, width, seed=seed) * torch.arange(1, width + 1) ** -power + 3).float()


def in_order(rows, k):
    """The k nearest by differences in float64, rows at one distance in order of their index."""
    everyone = torch.arange(len(rows))
    apart = distances_to(rows, everyone, everyone.expand(len(rows), -1), 1.0)
    near = apart.sort(dim=1, stable=True)
    return near.values[:, :k], near.indices[:, :k]


def searched(rows, k, own=None):
    ready = scale_rows(rows)
    own = torch.arange(len(rows)) if own is None else own
    return search(
        ready.values, own, k,
        lambda own, candidates: distances_to(rows, own, candidates, ready.frame.unit),
        float(ready.frame.scale), faiss,
    )  # fmt: skip


@pytest.fixture
def always(monkeypatch):
    """Lets every search that has rows enough go by integers."""
    monkeypatch.setattr(
        quantised, "pays", lambda points, width, wanted, k: quantised.fits(points, width, k)
    )


def any_directions(values, wanted, k):
    """A few directions that are of no use for the rows."""
    width = values.shape[1]
    return torch.linalg.qr(normal(width, max(1, width // 3))).Q


def leading_directions(values, wanted, k):
    """A few directions that hold most of the rows: bounds are little less than distances."""
    count = max(1, min(len(values), values.shape[1]) // 2)
    return certified.leading(values, count, torch.Generator().manual_seed(0))


@pytest.fixture(params=[None, any_directions, leading_directions], ids=["all", "any", "leading"])
def coordinates(request, monkeypatch):
    """Searches in all coordinates, and in few of them."""
    if request.param is not None:
        monkeypatch.setattr(quantised, "_directions", request.param)


@pytest.fixture
def asked(monkeypatch):
    """What searches by integers have found."""
    found = []
    monkeypatch.setattr(
        quantised, "search", lambda *given: found.append(search(*given)) or found[-1]
    )
    return found


@pytest.mark.usefixtures("always", "coordinates")
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, derandomize=True, max_examples=4)
@given(seed=st.integers(0, 10**6), k=st.sampled_from([1, 2, 16, 30]))
def test_hard_inputs_have_the_neighbours_of_all_pairs(kind, seed, k):
    rows = KINDS[kind](np.random.default_rng(seed))[:500]
    got = nearest(rows, k)
    distances, indices = in_order(rows, min(k, len(rows) - 1))
    assert torch.equal(got.distances, distances)
    assert torch.equal(got.indices, indices)


@pytest.mark.usefixtures("coordinates")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_certified_is_right(kind):
    some = False
    for seed in range(4):
        rows = KINDS[kind](np.random.default_rng(seed))[:800]
        if not quantised.fits(*rows.shape, 2):
            continue
        found = searched(rows, 2)
        distances, indices = in_order(rows, 2)
        assert torch.equal(found.distances[found.certain], distances[found.certain])
        assert torch.equal(found.places[found.certain], indices[found.certain])
        some |= bool(found.certain.any())
    assert some


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_rows_of_every_dtype_and_size(asked, dtype, size):
    rows = (size * normal(600, 40) * torch.arange(1, 41) ** -0.5).to(dtype)
    got = nearest(rows, 8)
    distances, indices = in_order(rows, 8)
    assert torch.equal(got.distances, distances)
    assert torch.equal(got.indices, indices)
    assert asked[0].certain.double().mean() > 0.95


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("massive", [1e3, 1e25, 1e30])
def test_massive_rows_leave_the_others_certified(asked, massive):
    rows = normal(700, 48)
    rows[:5] = massive * normal(5, 48, seed=1)
    got = nearest(rows, 4)
    distances, indices = in_order(rows, 4)
    assert torch.equal(got.distances, distances)
    assert torch.equal(got.indices, indices)
    # Beyond, all other rows together are less than the rounding of float32 allows to tell apart.
    assert (asked[0].certain[5:].double().mean() > 0.95) == (massive == 1e3)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("size", [1e-30, 1e-300, 1e300])
def test_rows_of_extreme_size(size):
    rows = size * normal(300, 30)
    got = nearest(rows, 3)
    want = in_order(rows / size, 3)
    torch.testing.assert_close(got.distances / size, want[0], rtol=1e-12, atol=0)
    assert torch.equal(got.indices, want[1])


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(20, 60), st.integers(2, 20), st.integers(0, 10**6), st.floats(-12, 12))
def test_integers_never_lengthen_a_distance_by_more_than_their_rounding(tokens, width, seed, power):
    rows = normal(tokens, width, seed=seed) * 10.0 ** (power * normal(tokens, 1, seed=seed + 1))
    values = (rows / rows.abs().max()).float()
    integers = quantised._integers(values, None, 1)
    if integers is None:
        return
    pairs = functools.partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
    apart = integers.per_unit * pairs(values.double(), values.double())
    moved = torch.from_numpy(integers.moved)
    whole = integers.rows[integers.at].double()
    assert (pairs(whole, whole) <= apart * (1 + 1e-12) + moved[:, None] + moved).all()
    # What the rounding to the nearest integer can do to a row, and no more.
    assert (moved <= 0.5001 * math.sqrt(width)).all()


def test_what_computation_moved_a_point_counts_in_the_units_of_integers():
    values = torch.rand(64, 3, generator=torch.Generator().manual_seed(0)) / 50
    moved = torch.linspace(0, 1e-2, 64, dtype=torch.float64)
    plain = quantised._integers(values, None, 1)
    more = quantised._integers(values, quantised.Few(values, moved, values[:, 0]), 1)
    assert plain.per_unit > 1000
    np.testing.assert_allclose(more.moved - plain.moved, plain.per_unit * moved.numpy(), rtol=1e-9)


def test_integers_stand_for_their_rows():
    rows = decaying(333, 30)
    values = scale_rows(rows).values
    integers = quantised._integers(values, None, 3)
    assert torch.equal(torch.from_numpy(integers.place)[integers.at], torch.arange(333))
    assert len(integers.rows) % max(quantised._SIZES) == 0
    want = (values * integers.per_unit).clamp(-127, 127).round()
    assert torch.equal(integers.rows[integers.at].float(), want)
    assert torch.equal(integers.square[integers.at].long(), want.long().square().sum(dim=1))
    # Wide rows too, whose squares float32 cannot add up exactly.
    values = scale_rows(normal(64, 3000)).values
    wide = quantised._integers(values, None, 1)
    assert torch.equal(wide.square[:64].long(), wide.rows[:64].long().square().sum(dim=1))


def test_a_nearer_row_within_the_rounding_is_not_passed_over():
    # In float32 nobody can see which of the first 60 rows is nearer to another of them.
    rows = 1e3 * normal(700, 64) * torch.arange(1, 65) ** -0.5
    rows[:60] = rows[0] + 1e-5 * normal(60, 64, seed=3)
    found = searched(rows, 2)
    assert not found.certain[:60].any()
    assert found.certain[60:].double().mean() > 0.9


def test_more_rows_within_the_rounding_than_are_compared_are_left_out():
    rows = normal(800, 32)
    rows[:300] = rows[0] + 1e-3 * normal(300, 32, seed=3)
    found = searched(rows, 2)
    distances, indices = in_order(rows, 2)
    assert torch.equal(found.distances[found.certain], distances[found.certain])
    assert torch.equal(found.places[found.certain], indices[found.certain])
    assert not found.certain[:300].any()
    assert found.certain[300:].double().mean() > 0.9


@pytest.mark.usefixtures("always", "coordinates")
def test_points_of_a_lattice_have_neighbours_in_order_of_the_index():
    side = torch.arange(6.0)
    rows = torch.cartesian_prod(side, side, side)[torch.randperm(216)]
    got = nearest(rows, 10)
    distances, indices = in_order(rows, 10)
    assert torch.equal(got.distances, distances)
    assert torch.equal(got.indices, indices)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_rows_at_one_distance_are_all_seen_in_few_coordinates(monkeypatch, asked, offset):
    """Where the directions hold the rows, nothing but rounding is between bound and distance."""
    side = torch.arange(8.0)
    lattice = torch.cartesian_prod(side, side, side)[torch.randperm(512)]
    rows = torch.cat([lattice, torch.zeros(512, 27)], dim=1) + offset
    monkeypatch.setattr(quantised, "_directions", lambda *_: torch.eye(30).double()[:, :3])
    # Of the six at one distance the first five, some of which only the second limit reaches.
    for name in ("_first_rank", "_next_rank"):
        monkeypatch.setattr(quantised, name, lambda *_: 5)
    got = nearest(rows, 5)
    distances, indices = in_order(rows, 5)
    assert torch.equal(got.distances, distances)
    assert torch.equal(got.indices, indices)
    inside = (lattice % 7 > 0).all(dim=1)
    assert asked[0].certain[inside].all()


def test_of_what_integers_leave_few_coordinates_drop_most_that_no_row_needs(monkeypatch):
    # Between clusters that are far apart the integers are coarse.
    inside = normal(3000, 12) + 30 * normal(20, 12, seed=1).repeat(150, 1)
    rows = inside @ normal(12, 600, seed=2) + 0.3 * normal(3000, 600, seed=3)
    directions = torch.linalg.svd(rows, full_matrices=False).Vh[:31].T
    monkeypatch.setattr(quantised, "_directions", lambda *_: directions)
    counts = {32: 0, 600: 0}
    differences = quantised._differences

    def spy(values, part, candidates, faiss):
        counts[values.shape[1]] += int((candidates >= 0).sum())
        return differences(values, part, candidates, faiss)

    monkeypatch.setattr(quantised, "_differences", spy)
    assert searched(rows, 2).certain.all()
    assert counts[600] < 0.5 * counts[32]


@pytest.mark.parametrize(
    ("ranks", "width", "want"),
    [
        ([7] * 50, 768, 7),  # all need as many
        ([4] * 45 + [60] * 5, 768, 4),  # few need many more: only their limit is set again
        ([4] * 5 + [6] * 45, 64, 6),  # two more cost less than to begin again
        ([4] * 20 + [30] * 30, 6000, 4),
        ([], 64, 5),
    ],
)
def test_the_first_limit_is_the_cheapest(ranks, width, want):
    integers = quantised._integers(scale_rows(normal(64, 30)).values, None, 1)
    assert quantised._next_rank(np.array(ranks, dtype=int), width, integers, 5) == want


@pytest.mark.usefixtures("always")
def test_some_rows_among_some(asked):
    rows = decaying(1500, 60)
    among = torch.arange(0, 1500, 2)
    of = among[::3]
    got = nearest(rows, 2, of=of, among=among)
    exact = rows.double()
    pairs = torch.cdist(exact[of], exact[among], compute_mode="donot_use_mm_for_euclid_dist")
    pairs[pairs == 0] = math.inf
    want = pairs.topk(2, dim=1, largest=False)
    torch.testing.assert_close(got.distances, want.values, rtol=1e-12, atol=0)
    assert torch.equal(got.indices, among[want.indices])
    assert [len(found.certain) for found in asked] == [250]


@pytest.mark.parametrize("k", [2, 16])
def test_integers_find_what_float32_finds(monkeypatch, asked, k):
    monkeypatch.setattr(quantised, "is_fast", lambda: True)
    rows = decaying(2100, 96)
    got = nearest(rows, k)
    assert [found.certain.double().mean() > 0.95 for found in asked] == [True]
    monkeypatch.setattr(quantised, "is_fast", lambda: False)
    monkeypatch.setattr(certified, "choose", lambda *_: None)
    want = nearest(rows, k)
    assert torch.equal(got.distances, want.distances)
    assert torch.equal(got.indices, want.indices)


@pytest.mark.parametrize("few", [False, True])
def test_few_directions_are_used_where_they_hold_the_rows(monkeypatch, asked, few):
    monkeypatch.setattr(quantised, "is_fast", lambda: True)
    rows = normal(3000, 512)
    if few:
        rows = normal(3000, 8) @ normal(8, 512) + 0.01 * rows
    used = []
    choose = quantised._few
    monkeypatch.setattr(quantised, "_few", lambda *given: used.append(choose(*given)) or used[-1])
    got = nearest(rows, 16)
    assert [None if one is None else one.values.shape[1] for one in used] == [32 if few else None]
    assert asked[0].certain.double().mean() > 0.95
    monkeypatch.setattr(quantised, "is_fast", lambda: False)
    want = nearest(rows, 16)
    assert torch.equal(got.distances, want.distances)
    assert torch.equal(got.indices, want.indices)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.integers(2, 200), st.integers(0, 10**6), st.floats(0, 4), st.floats(0, 3), st.floats(0, 1)
)
def test_few_coordinates_are_lower_bounds_beside_what_rounding_moved(
    width, seed, offset, power, massive
):
    rows = normal(40, width, seed=seed) * torch.arange(1, width + 1) ** -power + offset
    rows[:3] *= 10 ** (4 * massive)
    values = (rows / rows.abs().max()).float()
    count = max(1, width // 3)
    directions = torch.linalg.qr(normal(width, count, seed=seed + 1)).Q
    turn = torch.linalg.qr(normal(count, count, seed=seed + 2)).Q
    short, moved = quantised._coordinates(values, directions, turn)
    pairs = functools.partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
    apart = pairs(values.double(), values.double())
    bound = pairs(short.double(), short.double())
    assert (bound <= apart * (1 + 1e-12) + moved[:, None] + moved).all()
    # So little that the bounds are of use, but where next to nothing is left of a row.
    norm = values.double().norm(dim=1)
    assert (moved <= 0.05 * norm).all()


def test_few_coordinates_of_rows_near_the_centre_are_lower_bounds_too(monkeypatch):
    """Of the rest's norm a median is subtracted, whose rounding is much for such a row."""
    rows = normal(401, 24) * torch.tensor([3.0] * 3 + [0.02] * 21)
    rows[:, -1] += 8
    rows[:40] = 0
    rows[:40, -1] = torch.linspace(1e-3, 2e-3, 40)  # their bounds are their distances
    values = (rows / rows.abs().max()).float()
    monkeypatch.setattr(quantised, "_directions", lambda *_: torch.eye(24).double()[:, :3])
    few = quantised._few(values, 401, 2)
    pairs = functools.partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
    apart = pairs(values.double(), values.double())
    bound = pairs(few.values.double(), few.values.double())
    assert (bound <= apart * (1 + 1e-12) + few.moved[:, None] + few.moved).all()
    assert (few.moved[:40] <= 1e-7).all()


def test_what_rounding_moved_long_rows_does_not_loosen_the_limits_of_others(monkeypatch):
    rows = normal(3000, 8) @ normal(8, 512) + 0.01 * normal(3000, 512, seed=1)
    rows[:20] *= 300  # of these the rest is lost in the rounding
    directions = torch.linalg.svd(rows[20:], full_matrices=False).Vh[:31].T
    monkeypatch.setattr(quantised, "_directions", lambda *_: directions)
    found = searched(rows, 4)
    assert found.certain[20:].double().mean() > 0.99


def test_noise_has_no_use_for_directions_and_none_are_made(monkeypatch):
    made = []
    leading = quantised.leading
    monkeypatch.setattr(quantised, "leading", lambda *given: made.append(1) or leading(*given))
    assert quantised._directions(scale_rows(normal(1100, 512)).values, 1100, 2) is None
    assert made == []
    low = normal(1100, 8) @ normal(8, 512)
    assert quantised._directions(scale_rows(low).values, 1100, 2).shape == (512, 31)
    assert made == [1]


@pytest.mark.parametrize(("width", "count"), [(512, None), (1100, 63)])
def test_more_directions_are_tried_where_rows_are_very_wide(monkeypatch, asked, width, count):
    monkeypatch.setattr(quantised, "is_fast", lambda: True)
    # Of sixty equal directions 31 leave a half, and too many candidates.
    rows = normal(1600, 60) @ normal(60, width) / 8 + 0.01 * normal(1600, width, seed=1)
    chosen = quantised._directions(scale_rows(rows).values, len(rows), 2)
    assert (None if chosen is None else chosen.shape[1]) == count
    got = nearest(rows, 2)
    assert asked[-1].certain.double().mean() > 0.9
    monkeypatch.setattr(quantised, "is_fast", lambda: False)
    want = nearest(rows, 2)
    assert torch.equal(got.distances, want.distances)
    assert torch.equal(got.indices, want.indices)


@pytest.mark.parametrize("width", [60, 300])
def test_integers_are_made_once_for_all_searches_among_the_same_rows(monkeypatch, asked, width):
    monkeypatch.setattr(quantised, "is_fast", lambda: True)
    rows = decaying(2600, width)
    unique = torch.arange(0, 2600)[torch.arange(2600) % 13 != 0]
    ready = scale_rows(rows, unique)
    made = []
    few = quantised._few
    monkeypatch.setattr(quantised, "_few", lambda *given: made.append(given[1]) or few(*given))
    searches = [
        {"k": 16, "among": unique},
        {"k": 100, "among": unique, "of": unique[::15]},
        {"k": 8, "among": unique[::2].contiguous()},
    ]
    got = [nearest(rows, **given, scaled=ready) for given in searches]
    assert made == [2400]
    assert [found.certain.double().mean() > 0.95 for found in asked] == [True] * 3
    monkeypatch.setattr(quantised, "is_fast", lambda: False)
    for near, asked_for in zip(got, searches, strict=True):
        want = nearest(rows, **asked_for)
        assert torch.equal(near.distances, want.distances)
        assert torch.equal(near.indices, want.indices)


def test_integers_for_few_wanted_rows_are_made_again_for_many(monkeypatch):
    monkeypatch.setattr(quantised, "is_fast", lambda: True)
    rows = decaying(1500, 60)
    ready = scale_rows(rows)
    nearest(rows, 2, of=torch.arange(200), scaled=ready)
    assert [kept.wanted for kept in ready.integers] == [200]
    nearest(rows, 2, scaled=ready)
    assert [kept.wanted for kept in ready.integers] == [1500]


def test_integers_of_no_use_are_freed_and_not_made_again(monkeypatch, asked):
    monkeypatch.setattr(quantised, "is_fast", lambda: True)
    rows = two_clusters(2600, 40)
    ready = scale_rows(rows)
    # After a search of all rows: the few of a later one; and other rows, another question.
    searches = [{"k": 2}, {"k": 10, "of": torch.arange(0, 2600, 8)}]
    searches.append({"k": 2, "among": torch.arange(0, 2600, 2)})
    got, count = [], []
    for one in searches:
        got.append(nearest(rows, **one, scaled=ready))
        count.append(len(asked))
        assert ready.integers == [None]
    assert count == [1, 1, 2]
    assert quantised.ended_early(asked[0])
    monkeypatch.setattr(quantised, "is_fast", lambda: False)
    for near, one in zip(got, searches, strict=True):
        want = nearest(rows, **one)
        assert torch.equal(near.distances, want.distances)
        assert torch.equal(near.indices, want.indices)


def test_some_of_the_integers_are_those_of_their_rows():
    values = scale_rows(decaying(333, 30)).values
    few = quantised.Few(values[:, :7], values[:, 8].abs().double(), values[:, 9])
    whole = quantised._integers(values, few, 333)
    some = torch.arange(1, 333, 3)
    part = whole.of(some)
    assert all(map(torch.equal, part.few, (of_each[some] for of_each in few)))
    assert torch.equal(part.rows[part.at], whole.rows[whole.at[some]])
    assert torch.equal(part.square[part.at], whole.square[whole.at[some]])
    assert torch.equal(torch.from_numpy(part.place)[part.at], torch.arange(len(some)))
    assert np.array_equal(part.norm, whole.norm[some.numpy()])
    assert np.array_equal(part.moved, whole.moved[some.numpy()])
    # Filled up with points beyond all others.
    assert (part.square[len(some) :] == quantised._NONE).all()


def test_few_rows_narrow_rows_and_many_neighbours_are_left_to_float32(monkeypatch):
    monkeypatch.setattr(quantised, "is_fast", lambda: True)
    assert quantised.pays(4096, 128, 4096, 16)
    assert quantised.pays(4096, 128, 256, 100)
    assert not quantised.pays(4096, 128, 64, 100)
    assert not quantised.pays(900, 128, 900, 2)
    assert not quantised.pays(4096, 8, 4096, 16)
    assert not quantised.pays(2048, 128, 2048, 2047)
    assert not quantised.pays(4096, 40_000, 4096, 16)


def test_all_other_rows_as_neighbours():
    rows = decaying(60, 30)
    got = nearest(rows, 59)
    distances, indices = in_order(rows, 59)
    assert torch.equal(got.distances, distances)
    assert torch.equal(got.indices, indices)


def test_rows_that_are_nearly_all_zero_are_left_out():
    values = torch.zeros(400, 300)
    values[torch.arange(400), torch.arange(400) % 300] = 1.0
    assert not searched(values, 2).certain.any()


@pytest.mark.parametrize(("least", "rows_searched"), [(1.1, 500), (0.0, 1200)])
def test_first_rows_that_are_hardly_certified_end_the_search(monkeypatch, least, rows_searched):
    monkeypatch.setattr(quantised, "_QUERIES", 500)
    monkeypatch.setattr(quantised, "_LEAST", least)
    rows = decaying(1200, 50)
    assert int(searched(rows, 2).certain.sum()) == pytest.approx(rows_searched, rel=0.05)


def two_clusters(tokens, width):
    """Rows whose integers are all alike within a cluster: half of all pairs are candidates."""
    side = torch.arange(tokens) % 2 - 0.5
    return (side[:, None] * normal(width) + 1e-6 * normal(tokens, width)).float()


def test_of_rows_that_integers_cannot_tell_apart_few_are_tried():
    rows = two_clusters(3000, 40)
    ready, tried = scale_rows(rows), []

    def exact(own, candidates):
        tried.append(len(own))
        return distances_to(rows, own, candidates, ready.frame.unit)

    everyone = torch.arange(len(rows))
    found = search(ready.values, everyone, 2, exact, float(ready.frame.scale), faiss)
    assert quantised.ended_early(found)
    assert 0 < sum(tried) <= len(rows) / 20


def test_of_rows_that_are_tried_few_squares_are_held_at_a_time(monkeypatch):
    rows, at_once = two_clusters(3000, 40), []
    multiply = quantised.multiply

    def spy(one, other, out):
        at_once.append(len(one))
        multiply(one, other, out)

    monkeypatch.setattr(quantised, "multiply", spy)
    monkeypatch.setattr(quantised, "_TRIAL_SQUARES", 20 * len(rows))
    assert not bool(searched(rows, 2).certain.any())
    assert sum(at_once) == quantised._TRIED
    assert max(at_once) < 20  # places are filled up to whole groups


@pytest.mark.parametrize("k", [2, 16])
def test_many_candidates_take_no_more_memory_than_their_squares(monkeypatch, k):
    monkeypatch.setattr(quantised, "_TRIED", 500)
    rows = two_clusters(2000, 600)
    squares = 4 * 500 * len(rows)
    searched(rows[:300], 2)  # what is set up once
    tracemalloc.start()
    try:
        searched(rows, k)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * squares


def test_no_global_random_state_is_touched():
    before = torch.random.get_rng_state()
    searched(decaying(600, 30), 2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_nothing_is_certain_of_no_rows():
    found = searched(decaying(300, 32), 2, torch.empty(0, dtype=torch.int64))
    assert found.certain.shape == (0,)


def test_what_integers_cannot_tell_apart_is_searched_as_without_them(monkeypatch):
    monkeypatch.setattr(quantised, "is_fast", lambda: True)
    rows = normal(20, 300).repeat_interleave(80, dim=0) + 1e-9 * normal(1600, 300)
    planned, ended = [], []
    choose, end = certified.choose, quantised.ended_early
    monkeypatch.setattr(certified, "choose", lambda *given: planned.append(choose(*given)))
    monkeypatch.setattr(
        quantised, "ended_early", lambda found: ended.append(end(found)) or ended[-1]
    )
    got = nearest(rows, 2)
    assert ended == [True]
    assert len(planned) == 1
    monkeypatch.setattr(quantised, "is_fast", lambda: False)
    want = nearest(rows, 2)
    assert torch.equal(got.distances, want.distances)
    assert torch.equal(got.indices, want.indices)


@settings(deadline=None, derandomize=True, max_examples=20)
# Of steeper spectra long rows, which are most of the squares, are taken for massive ones.
@given(st.integers(0, 10**6), st.floats(0, 1.5), st.floats(0, 6))
def test_little_is_cut_off_however_long_a_few_rows_are(seed, power, massive):
    values = decaying(600, 40, power=power, seed=seed) - 3
    values[:5] *= 10**massive
    values /= values.abs().max()
    largest = quantised._cut_off(values)
    others = values[5:].double()
    lost = (others.abs() - largest).clamp(min=0).square().sum() / others.square().sum()
    assert lost < 0.02
    # And no integers are wasted on the massive rows.
    assert largest <= others.abs().max()


def test_without_faiss_the_rows_are_searched_in_torch(monkeypatch, asked):
    monkeypatch.setattr(geomon.kernels.neighbours, "faiss", None)
    monkeypatch.setattr(quantised, "is_fast", lambda: True)
    nearest(decaying(1100, 30), 2)
    assert asked == []
