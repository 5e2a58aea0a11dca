import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import geomon.kernels.neighbours
from benchmarks.exactness import KINDS
from geomon.kernels import certified, quantised
from geomon.kernels._candidates import distances_to, nearest_first
from geomon.kernels.certified import Certified, Plan, choose, coordinates, search
from geomon.kernels.neighbours import nearest, scale_rows

faiss = pytest.importorskip("faiss")


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def decaying(tokens, width, *, power=1.0, seed=0):
    rows = normal(tokens, width, seed=seed) * torch.arange(1, width + 1) ** -power
    return (rows + 3).float()


def directions(width, count, seed=0):
    return torch.linalg.qr(normal(width, count, seed=seed)).Q


def in_order(rows, k):
    """The k nearest by differences in float64, rows at one distance in order of their index."""
    everyone = torch.arange(len(rows))
    apart = distances_to(rows, everyone, everyone.expand(len(rows), -1), 1.0)
    near = apart.sort(dim=1, stable=True)
    return near.values[:, :k], near.indices[:, :k]


def searched(rows, k, plan):
    ready = scale_rows(rows)
    return search(
        ready.values, torch.arange(len(rows)), k, plan,
        lambda own, candidates: distances_to(rows, own, candidates, ready.frame.unit),
        float(ready.frame.scale), faiss.knn,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _without_integers(monkeypatch):
    """Leaves the rows to the search under test."""
    monkeypatch.setattr(quantised, "pays", lambda *_: False)


@pytest.fixture
def always(monkeypatch):
    """Lets every search go by lower bounds, in a few directions of no use for the rows."""

    def plan(values, wanted, k):
        del wanted
        width = values.shape[1]
        return Plan(directions(width, max(1, width // 3)), certified._rungs(k)[-1], 0.0)

    monkeypatch.setattr(certified, "choose", plan)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(2, 60), st.integers(1, 20), st.integers(0, 10**6), st.floats(-12, 12))
def test_coordinates_never_lengthen_a_distance(tokens, width, seed, power):
    rows = normal(tokens, width, seed=seed) * 10.0 ** (power * normal(tokens, 1, seed=seed + 1))
    values = (rows / rows.abs().max()).float()
    short = coordinates(values, directions(width, (width + 1) // 2, seed)).double()
    pairs = functools.partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
    norm = values.double().norm(dim=1)
    rounding = 1e-6 * (norm[:, None] + norm) + certified.UNDERFLOW
    assert (pairs(short, short) <= pairs(values.double(), values.double()) + rounding).all()


def test_bounds_are_distances_where_the_directions_hold_the_rows():
    basis = directions(40, 5)
    rows = (normal(50, 5) @ basis.T).float()
    short = coordinates(rows, basis)
    assert short.shape == (50, 6)
    torch.testing.assert_close(
        torch.pdist(short.double()), torch.pdist(rows.double()), rtol=1e-6, atol=1e-6
    )


def test_the_rest_keeps_its_digits_where_it_is_small():
    basis = directions(64, 8)
    rows = (normal(100, 8) @ basis.T).float()
    # Of squares in float32 a thousandth of the norm would be left.
    assert coordinates(rows, basis)[:, -1].max() < 2e-7 * rows.norm(dim=1).max()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, derandomize=True, max_examples=4)
@given(seed=st.integers(0, 10**6), k=st.sampled_from([1, 2, 16, 100]))
def test_hard_inputs_have_the_neighbours_of_all_pairs(kind, seed, k):
    rows = KINDS[kind](np.random.default_rng(seed))[:400]
    got = nearest(rows, k)
    distances, indices = in_order(rows, min(k, len(rows) - 1))
    assert torch.equal(got.distances, distances)
    assert torch.equal(got.indices, indices)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_certified_is_right(kind):
    some = False
    for seed in range(4):
        rows = KINDS[kind](np.random.default_rng(seed))[:800]
        width = rows.shape[1]
        plan = Plan(directions(width, max(1, width // 2)), min(30, len(rows)), 0.0)
        if len(rows) <= 12:
            continue
        found = searched(rows, 2, plan)
        distances, indices = in_order(rows, 2)
        assert torch.equal(found.distances[found.certain], distances[found.certain])
        assert torch.equal(found.places[found.certain], indices[found.certain])
        some |= bool(found.certain.any())
    assert some


def test_a_nearer_row_within_the_rounding_is_not_passed_over():
    # In float32 nobody can see which of the first 60 rows is nearer to another of them.
    rows = 1e3 * normal(700, 64) * torch.arange(1, 65) ** -2.0
    rows[:60] = rows[0] + 1e-5 * normal(60, 64, seed=3)
    found = searched(rows, 2, Plan(torch.eye(64, 31, dtype=torch.float64), 30, 0.0))
    assert not found.certain[:60].any()
    assert found.certain[60:].double().mean() > 0.9


@pytest.mark.parametrize("k", [2, 16, 100])
def test_the_plan_finds_what_the_whole_search_finds(monkeypatch, k):
    rows = decaying(4096, 256, power=1.2)
    asked = []
    monkeypatch.setattr(
        certified, "search", lambda *given: asked.append(search(*given)) or asked[-1]
    )
    got = nearest(rows, k)
    monkeypatch.setattr(certified, "choose", lambda *_: None)
    want = nearest(rows, k)
    assert torch.equal(got.distances, want.distances)
    assert torch.equal(got.indices, want.indices)
    if k == 2:
        assert [found.certain.double().mean() > 0.9 for found in asked] == [True]


def test_some_rows_among_some_by_lower_bounds(monkeypatch):
    rows = decaying(3000, 96, power=1.5)
    among = torch.arange(0, 3000, 2)
    of = among[::3]
    asked = []

    def plan(values, wanted, k):
        asked.append((len(values), wanted, k))
        return Plan(torch.eye(96, 40, dtype=torch.float64), 20, 0.0)

    monkeypatch.setattr(certified, "choose", plan)
    got = nearest(rows, 2, of=of, among=among)
    assert asked == [(1500, 500, 2)]
    exact = rows.double()
    pairs = torch.cdist(exact[of], exact[among], compute_mode="donot_use_mm_for_euclid_dist")
    pairs[pairs == 0] = math.inf
    want = pairs.topk(2, dim=1, largest=False)
    torch.testing.assert_close(got.distances, want.values, rtol=1e-12, atol=0)
    assert torch.equal(got.indices, among[want.indices])


@pytest.mark.parametrize(("tokens", "width"), [(4096, 64), (900, 768), (4096, 512)])
def test_noise_narrow_rows_and_few_rows_are_searched_in_all_coordinates(tokens, width):
    values = scale_rows(normal(tokens, width)).values
    assert choose(values, tokens if width == 512 else 256, 2) is None


@pytest.mark.parametrize(("least", "rows_searched"), [(0.5, 1000), (0.0, 2000)])
def test_a_first_block_that_is_hardly_certified_ends_the_search(monkeypatch, least, rows_searched):
    monkeypatch.setattr(certified, "_QUERIES", 1000)
    rows = normal(2000, 96).float()
    ready = scale_rows(rows)
    asked = []

    def knn(queries, points, count):
        asked.append(len(queries))
        return faiss.knn(queries, points, count)

    search(
        ready.values, torch.arange(2000), 2, Plan(directions(96, 8), 10, least),
        lambda own, near: distances_to(rows, own, near, 1.0), float(ready.frame.scale), knn,
    )  # fmt: skip
    assert sum(asked) == rows_searched


def test_equal_distances_stand_in_order_of_the_index():
    distances = torch.tensor([[1.0, 1.0, 0.5, 1.0], [4.0, 3.0, 2.0, 1.0]])
    candidates = torch.tensor([[7, 3, 9, 5], [0, 1, 2, 3]])
    values, index = nearest_first(distances, candidates)
    assert values.tolist() == [[0.5, 1, 1, 1], [1, 2, 3, 4]]
    assert index.tolist() == [[9, 3, 5, 7], [3, 2, 1, 0]]


@pytest.mark.parametrize("torch_only", [False, True])
def test_points_of_a_lattice_have_neighbours_in_order_of_the_index(monkeypatch, torch_only):
    if torch_only:
        monkeypatch.setattr(geomon.kernels.neighbours, "faiss", None)
    side = torch.arange(6.0)
    rows = torch.cartesian_prod(side, side, side)[torch.randperm(216)]
    got = nearest(rows, 10)
    distances, indices = in_order(rows, 10)
    assert torch.equal(got.distances, distances)
    assert torch.equal(got.indices, indices)


def test_rows_that_one_massive_row_leaves_no_squares_in_float32():
    rows = normal(600, 48)
    rows[0] = 1e25
    got = nearest(rows, 2)
    distances, indices = in_order(rows, 2)
    assert torch.equal(got.indices[1:], indices[1:])
    assert torch.equal(got.distances[1:], distances[1:])


def test_no_global_random_state_is_touched():
    before = torch.random.get_rng_state()
    nearest(decaying(4096, 256, power=1.2), 2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_nothing_certain_is_what_an_empty_search_says():
    rows = decaying(300, 32)
    ready = scale_rows(rows)
    found = search(
        ready.values, torch.empty(0, dtype=torch.int64), 2, Plan(directions(32, 8), 9, 0.5),
        lambda own, near: distances_to(rows, own, near, 1.0), 1.0, faiss.knn,
    )  # fmt: skip
    assert isinstance(found, Certified)
    assert found.certain.shape == (0,)
