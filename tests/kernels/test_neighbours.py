import math
import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from geomon.kernels import neighbours
from geomon.kernels.neighbours import searched_by
from support.kernels import Neighbours, content_keys, copies_of, nearest, unique_rows
from support.samples import generator, normal


def use(search, monkeypatch):
    """Make one search find all candidates."""
    if search == "faiss":
        pytest.importorskip("faiss")
    chosen = (getattr(neighbours, f"_by_{search}"),)
    monkeypatch.setattr(neighbours, "_searches", lambda device: chosen)
    monkeypatch.setattr(neighbours, "_taken", {})


@pytest.fixture(params=["faiss", "torch"])
def path(request, monkeypatch):
    """Runs a test once with FAISS and once with the search in torch."""
    use(request.param, monkeypatch)
    return request.param


def all_pairs(rows):
    """Distances in float64 from differences, with self out by its index."""
    rows = rows.double()
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.fill_diagonal_(math.inf)


def brute_force(rows, k):
    """The nearest of all pairs; of rows that are equally far, the first."""
    near = all_pairs(rows).sort(dim=1, stable=True)
    return Neighbours(near.values[:, :k], near.indices[:, :k])


def assert_nearest(got, rows, k, *, rtol=1e-12):
    """Right distances; indices that belong to them; no row its own neighbour."""
    want, own = all_pairs(rows).topk(k, largest=False).values, rows.double()
    apart = (own[:, None] - own[got.indices]).norm(dim=-1)
    for distances in (want, apart):
        torch.testing.assert_close(got.distances, distances, rtol=rtol, atol=0)
    assert got.indices.dtype == torch.int64
    assert (got.indices != torch.arange(len(rows))[:, None]).all()
    assert (got.distances.diff(dim=1) >= 0).all()
    assert all(len(set(row)) == len(row) for row in got.indices.tolist())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("tokens", "width", "offset"), [(300, 40, 0), (600, 256, 1e4), (4200, 24, 1e4)]
)
def test_nearest_agrees_with_all_pairs_also_far_from_the_origin(tokens, width, offset):
    """Squares of 6e9 have a spacing of 512 in float32, and squared distances are about 100."""
    rows = (normal(tokens, width) + offset).float()
    assert_nearest(nearest(rows, k=10), rows, 10)


@pytest.mark.usefixtures("path")
@settings(
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=5, max_size=12),
    exponents=st.lists(st.integers(-15, 1), min_size=12, max_size=12),
    far=st.sampled_from([0.0, 1e3, 1e8]),
    k=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 99),
)
def test_nearest_in_groups_of_any_size_and_spread(sizes, exponents, far, k, seed):
    """One group may be far from all others, another a cloud: each row is right by differences."""
    centres = normal(len(sizes), 6, seed=seed)
    centres[0] += far
    rows = torch.cat([
        centre + 10.0**exponent * normal(size, 6, seed=seed + size)
        for centre, size, exponent in zip(centres, sizes, exponents, strict=False)
    ])  # fmt: skip
    assume(len(rows) > k)
    assert_nearest(nearest(rows, k=k), rows, k, rtol=1e-9)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("tokens", [2, 3, 10])
def test_fewer_neighbours_where_there_are_fewer_rows(tokens):
    rows = normal(tokens, 4)
    got = nearest(rows, k=64)
    assert got.distances.shape == (tokens, tokens - 1)
    assert_nearest(got, rows, tokens - 1)
    none = nearest(rows, k=2, of=torch.tensor([], dtype=torch.int64))
    assert none.distances.shape == none.indices.shape == (0, min(2, tokens - 1))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("far", [0.0, 1000.0])
def test_copies_come_first_and_rows_at_equal_distances_in_their_order(far):
    rows = (normal(200, 64).float() + far).repeat(3, 1)
    got = nearest(rows, k=7)
    assert torch.equal(got.indices, brute_force(rows, 7).indices)
    assert torch.equal(got.distances == 0, (torch.arange(7) < 2).expand(600, -1))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e-30, 1e30, 1e150, 1e300])
def test_units_far_outside_the_range_of_float32(scale):
    rows = normal(450, 8)
    got, want = nearest(rows * scale, k=3), nearest(rows, k=3)
    torch.testing.assert_close(got.distances / scale, want.distances, rtol=1e-11, atol=0)
    assert torch.equal(got.indices, want.indices)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "of",
    [
        torch.randperm(300, generator=generator(1)), torch.arange(300).flip(0),
        torch.cat([torch.arange(299), torch.tensor([0])]), torch.arange(40, 260),
    ],
    ids=["shuffled", "reversed", "one twice", "next to each other"],
)  # fmt: skip
def test_each_wanted_row_has_its_own_neighbours_in_any_order(of):
    rows = normal(100, 40).repeat_interleave(3, dim=0) + 1e-7 * normal(300, 40, seed=1) + 5
    want, got = nearest(rows, 4), nearest(rows, 4, of=of)
    assert torch.equal(got.distances, want.distances[of])
    assert torch.equal(got.indices, want.indices[of])
    assert torch.allclose(got.distances, brute_force(rows, 4).distances[of], rtol=1e-9)


@pytest.mark.parametrize(
    "given",
    [
        {"among": torch.arange(60).flip(0)},
        {"among": torch.arange(30).flip(0)},
        {"among": torch.tensor([0, 0, 1, 2])},
        {"among": torch.arange(-1, 30)},
        {"among": torch.arange(20, 61)},
        {"among": torch.arange(60) % 2 == 0},
        {"of": torch.arange(60) % 2 == 0},
        {"of": torch.tensor([-1])},
        {"of": torch.tensor([60])},
        {"of": torch.tensor([1]), "among": torch.arange(0, 60, 2)},
        {"of": torch.tensor([59]), "among": torch.arange(0, 60, 2)},
    ],
)
def test_indices_that_name_other_rows_than_are_searched_are_no_indices(given):
    rows = normal(60, 3)
    with pytest.raises(
        ValueError, match=r"expected (only )?indices of (rows|the \d0 searched rows)"
    ):
        nearest(rows, 3, **given)


KINDS = {
    "cloud": lambda rows: rows,
    "far": lambda rows: rows + 1e3,
    "very far": lambda rows: rows + 1e6,
    "leading directions": lambda rows: rows * torch.arange(1, rows.shape[1] + 1) ** -1.5,
    "copies": lambda rows: rows[torch.arange(len(rows)) * 7 % len(rows) // 3] + 50,
    "near-copies": lambda rows: rows[torch.arange(len(rows)) // 40 * 40] + 1e-6 * rows + 50,
    "ties": torch.round,
    "bfloat16": torch.Tensor.bfloat16,
    "bfloat16, far": lambda rows: (rows + 30).bfloat16(),
    "float64, tiny": lambda rows: rows.double() * 1e-200,
    "float64, huge": lambda rows: rows.double() * 1e200,
    "a massive row": lambda rows: rows * torch.where(torch.arange(len(rows)) == 3, 1e4, 1)[:, None],
}


@settings(
    deadline=None,
    derandomize=True,
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    tokens=st.sampled_from([2, 3, 40, 290, 700, 1500]),
    width=st.sampled_from([1, 2, 17, 64]),
    k=st.sampled_from([1, 2, 16, 64, 96, 200]),
    seed=st.integers(0, 99),
    queries=st.sampled_from([1, 30, None]),
    exact=st.booleans(),
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_depends_on_the_library_that_searches(
    kind, tokens, width, k, seed, queries, exact, monkeypatch
):
    rows = KINDS[kind](normal(tokens, width, seed=seed).float())
    among = torch.arange(len(rows) > 3, len(rows))
    of = None if queries is None else among[:queries]
    found = []
    for search in ("faiss", "torch"):
        use(search, monkeypatch)
        if not exact:  # as if the training had float32 products rounded
            monkeypatch.setattr(neighbours, "factor_type", lambda device: torch.float64)
        found.append(nearest(rows, k, of=of, among=among))
    assert all(map(torch.equal, *found))
    shorter = nearest(rows, 1, of=of, among=among)
    assert all(
        torch.equal(long[:, :1], short) for long, short in zip(found[0], shorter, strict=True)
    )


@pytest.mark.parametrize("trained", [True, False])
def test_the_search_that_took_less_time_in_trials_does_the_others(trained, monkeypatch):
    """Each is tried on searches that are wanted anyway, so that trials compute nothing twice."""
    pytest.importorskip("faiss")
    calls, slow = [], "_by_torch" if trained else "_by_faiss"

    def timed(search):
        def call(values, own, count):
            calls.append(search.__name__)
            time.sleep(0.02 if search.__name__ == slow else 0)
            return search(values, own, count)

        return call

    searches = tuple(map(timed, neighbours._searches(torch.device("cpu"))))
    monkeypatch.setattr(neighbours, "_searches", lambda device: searches)
    monkeypatch.setattr(neighbours, "_taken", {})
    rows, state = normal(300, 16).float(), torch.get_rng_state()
    want = nearest(rows, 4)
    for _ in range(13):
        assert all(map(torch.equal, nearest(rows, 4), want))
    assert calls.count(slow) == 5
    assert calls[10:] == [({"_by_torch", "_by_faiss"} - {slow}).pop()] * 4
    assert torch.equal(torch.get_rng_state(), state)


def test_trials_end_also_if_several_threads_make_them_at_once(monkeypatch):
    """Each of them may find a trial missing, and add one."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(neighbours, "_taken", {})
    rows = normal(300, 16).float()
    want = nearest(rows, 4)
    (kind,) = neighbours._taken
    neighbours._taken[kind] = {refuse: [1.0] * 7, neighbours._by_faiss: [0.5] * 5}
    assert all(map(torch.equal, nearest(rows, 4), want))


def test_which_library_searches_is_said_with_its_version(monkeypatch):
    faiss = pytest.importorskip("faiss")
    host = torch.device("cpu")
    assert searched_by(host) == f"FAISS {faiss.__version__} or torch, the faster one in trials"
    monkeypatch.setattr(neighbours, "faiss", None)
    assert searched_by(host) == "torch"


def first_of(rows):
    """The index of the first row that is equal to each."""
    first = {}
    return [first.setdefault(tuple(row), index) for index, row in enumerate(rows.tolist())]


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [300, 2000])
def test_unique_rows_takes_out_exact_copies_and_nothing_else(dtype, tokens):
    rows = (normal(tokens, 32) + 100).to(dtype)
    rows[0], rows[1] = 0.0, -0.0  # which are equal
    source = torch.randint(tokens, (tokens // 4,), generator=generator(1))
    order = torch.randperm(len(rows) + len(source), generator=generator(2))
    mixed = torch.cat([rows, rows[source]])[order]
    before, copies = mixed.clone(), copies_of(mixed)
    assert copies.tolist() == first_of(mixed)
    assert unique_rows(copies).tolist() == sorted({*first_of(mixed)})
    assert torch.equal(mixed, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_of_one_column_are_found_at_any_size_and_rows_without_columns_are_equal(dtype):
    column, limits = torch.tensor([[3.0], [1.0], [3.0], [1.0]], dtype=dtype), torch.finfo(dtype)
    for size in (1, limits.tiny, limits.max / 4):
        assert copies_of(column * size).tolist() == [0, 1, 0, 1]
    assert copies_of(column[:, :0]).tolist() == [0, 0, 0, 0]


def test_rows_of_few_digits_are_copies_only_where_they_are_equal():
    """Powers of two differ in 12 bits alone, so that numbers of their content are the same."""
    rows = 2.0 ** torch.randint(-12, 12, (600, 3), generator=generator(3)).double()
    expected = first_of(rows)
    assert len(content_keys(rows, torch.arange(600)).unique()) < len({*expected}) < 600
    assert copies_of(rows).tolist() == expected


@pytest.mark.parametrize("wanted", [30, 3000])
@pytest.mark.usefixtures("path")
def test_autocast_of_the_training_rounds_no_distance(wanted):
    rows, some = (normal(3000, 300) + 3 * normal(3000, 1, seed=1)).float(), torch.arange(wanted)
    want = nearest(rows, 16, of=some)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, nearest(rows, 16, of=some), want))


FORKING = """
import os, sys
import faiss, torch  # in this order, as users of both have it
from geomon.kernels import neighbours

neighbours._searches = lambda device: (neighbours._by_faiss,)
torch.set_num_threads(2)
rows = torch.randn(2000, 16)
before = faiss.omp_get_max_threads(), torch.get_num_threads()
neighbours.nearest(rows, 5)
assert (faiss.omp_get_max_threads(), torch.get_num_threads()) == before
if os.fork() == 0:
    faiss.knn(rows.numpy(), rows.numpy(), 5)
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_is_forked_after_a_search_can_search_itself():
    pytest.importorskip("faiss")
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run([sys.executable, "-c", FORKING], env=environment, timeout=60, check=False)
    assert ran.returncode == 7


def refuse(*args):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("what", "stand_in"),
    [
        ("concurrent.futures.ThreadPoolExecutor.submit", refuse),
        ("threading.stack_size", lambda: 65536),
    ],
)
def test_without_threads_of_its_own_a_search_is_right_and_leaves_their_number(
    what, stand_in, monkeypatch
):
    faiss = pytest.importorskip("faiss")
    use("faiss", monkeypatch)
    rows = normal(700, 12).float()
    expected, limits = nearest(rows, 5), (faiss.omp_get_max_threads(), torch.get_num_threads())
    monkeypatch.setattr(what, stand_in)
    try:
        faiss.omp_set_num_threads(2)
        torch.set_num_threads(2)
        found = nearest(rows, 5)
        assert faiss.omp_get_max_threads() == 2
    finally:
        faiss.omp_set_num_threads(limits[0])
        torch.set_num_threads(limits[1])
    assert all(map(torch.equal, found, expected))
