"""What every kernel of rows, or of distances, keeps: each stands with its contract in one table."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import definitions as by_book
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import dyadic, generator, normal, seeds

from geomon.capture.snapshot import HOST
from geomon.kernels._blocks import row_blocks, rows_in_block
from geomon.kernels.angles import cosine_centred, leading_share, sequence_cosines
from geomon.kernels.dimension import gride, twonn
from geomon.kernels.frequency import moments_by_frequency
from geomon.kernels.groups import group_sums
from geomon.kernels.massive import ordinary_rows, share_beyond
from geomon.kernels.moments import drift_norm, mean_square_norm, squares_about_mean, variance
from geomon.kernels.neighbours import nearest
from geomon.kernels.spectrum import (
    anisotropy,
    effective_rank,
    head_axes,
    participation_ratio,
    power_law,
    principal_axes,
    spectrum,
)
from geomon.kernels.token_types import token_types

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
few_examples = settings(deadline=None, derandomize=True, max_examples=15)


@dataclass(frozen=True)
class Kernel:
    """A kernel of rows and of a label for each, and how its value follows the rows.

    Attributes:
        function: Takes rows [tokens, width] and labels [tokens].
        definition: The same in numpy.
        scale: Power of a factor on the rows with which the value grows.
        shift: Whether a vector added to all rows changes nothing.
        by_row: Whether there is a value for each row, in the order of the rows.
        equal: What it gives where all rows are equal; None where that depends on the row.
        least: Fewest rows that it takes.
        by_head: Whether it takes rows by head.
    """

    function: Callable
    definition: Callable
    scale: int = 0
    shift: bool = False
    by_row: bool = False
    equal: float | None = None
    least: int = 1
    by_head: bool = False


def heads(function):
    return lambda rows, labels: function(rows[:, None] if rows.ndim == 2 else rows)


def one_group(rows):
    return torch.zeros(len(rows), dtype=torch.int64)


def of_sums(name):
    return lambda rows, labels: getattr(group_sums(rows[:, None], labels % 8), name)


def slope(rows, labels):
    return torch.stack([*token_types(rows, labels).norm_variance_slope()])


def of_class(name, power, definition):
    """A moment of each class of frequency; `labels_of` gives three types, each one a class."""

    def function(rows, ids):
        return torch.stack([getattr(part, name) for part in moments_by_frequency(rows, ids)])

    return Kernel(
        function, lambda x, ids: np.array([definition(x[ids == kind]) for kind in (2, 1, 0)]),
        scale=power, shift=name in ("variance", "rows", "types"),
    )  # fmt: skip


NAN = math.nan
KERNELS = {
    "cosine_centred": Kernel(
        lambda x, _: cosine_centred(x), lambda x, _: by_book.mean_cosine(by_book.centred(x)),
        shift=True, equal=NAN, least=2,
    ),
    "within sequences": Kernel(
        lambda x, s: sequence_cosines(x, s).within,
        lambda x, s: by_book.mean_cosine(x, s[:, None] == s), equal=1, least=2,
    ),
    "between sequences": Kernel(
        lambda x, s: sequence_cosines(x, s).between,
        lambda x, s: by_book.mean_cosine(x, s[:, None] != s), equal=1, least=2,
    ),
    "drift_norm": Kernel(
        lambda x, _: drift_norm(x), lambda x, _: np.linalg.norm(x.mean(axis=0)), scale=1
    ),
    "variance": Kernel(
        lambda x, _: variance(x), lambda x, _: x.var(axis=0).sum(), scale=2, shift=True, equal=0
    ),
    "mean_square_norm": Kernel(
        lambda x, _: mean_square_norm(x), lambda x, _: np.square(x).sum(axis=1).mean(), scale=2
    ),
    "squares_about_mean": Kernel(
        lambda x, _: squares_about_mean(x), lambda x, _: by_book.squares(x),
        scale=2, shift=True, by_row=True, equal=0,
    ),
    "spectrum": Kernel(
        lambda x, _: spectrum(x), lambda x, _: by_book.eigenvalues(x), scale=2, shift=True, equal=0
    ),
    "principal_axes": Kernel(
        lambda x, s: principal_axes(x, s, 5).eigenvalues, lambda x, _: by_book.eigenvalues(x),
        scale=2, shift=True, equal=0,
    ),
    "anisotropy": Kernel(
        lambda x, _: anisotropy(spectrum(x)), lambda x, _: by_book.shares(x)[0],
        shift=True, equal=NAN,
    ),
    "effective_rank": Kernel(
        lambda x, _: effective_rank(spectrum(x)), lambda x, _: by_book.effective_rank(x),
        shift=True, equal=NAN,
    ),
    "participation_ratio": Kernel(
        lambda x, _: participation_ratio(spectrum(x)), lambda x, _: by_book.participation_ratio(x),
        shift=True, equal=NAN,
    ),
    "power_law": Kernel(
        lambda x, _: torch.stack(power_law(spectrum(x))), lambda x, _: by_book.fitted_law(x),
        shift=True, equal=NAN,
    ),
    "ordinary_rows": Kernel(
        lambda x, _: ordinary_rows(x).double(), lambda x, _: by_book.are_ordinary(x) * 1.0,
        shift=True, by_row=True, equal=1,
    ),
    "share_beyond": Kernel(
        lambda x, _: share_beyond(squares_about_mean(x), ordinary_rows(x)),
        lambda x, _: by_book.sink_share(x),
        shift=True, equal=NAN,
    ),
    "nearest": Kernel(
        lambda x, _: nearest(x, 2).distances, lambda x, _: by_book.distances(x)[:, :2],
        scale=1, shift=True, by_row=True, equal=0, least=2,
    ),
    "within_variance": Kernel(
        lambda x, t: token_types(x, t).within_variance, by_book.within_variance,
        scale=2, shift=True, equal=0
    ),
    "norm_variance_slope": Kernel(slope, by_book.fitted_types),
    "head_axes": Kernel(
        heads(lambda x: leading_share(head_axes(x, one_group(x), 1).eigenvalues)),
        lambda x, _: by_book.shares(x)[0], shift=True, equal=NAN, by_head=True,
    ),
    "mean of groups": Kernel(
        lambda x, s: of_sums("mean")(x, s).norm(dim=1),
        lambda x, _: np.linalg.norm(x.mean(axis=0)), scale=1,
    ),
    "squares of groups": Kernel(
        of_sums("square"), lambda x, _: np.square(x).sum(axis=1).mean(), scale=2
    ),
    "cosine of groups": Kernel(of_sums("cosine"), lambda x, _: by_book.mean_cosine(x), equal=1),
    "norm by frequency": of_class("norm", 1, lambda x: by_book.norms(x).mean()),
    "M by frequency": of_class("square_of_mean", 2, lambda x: np.square(x.mean(axis=0)).sum()),
    "V by frequency": of_class("variance", 2, lambda x: x.var(axis=0).sum()),
    "Q by frequency": of_class("mean_square_norm", 2, lambda x: np.square(x).sum(axis=1).mean()),
    "rows by frequency": of_class("rows", 0, len),
    "types by frequency": of_class("types", 0, lambda x: 1),
}  # fmt: skip
DISTANCES = {
    "twonn": lambda near: torch.stack([*twonn(near)]),
    "gride": lambda near: gride(near, [1, 2]),
}


def labels_of(rows):
    """Three labels; of 60 rows they have 30, 20 and 10."""
    return torch.tensor([0, 0, 0, 1, 1, 2])[torch.arange(len(rows)) % 6]


def sample(tokens=60, width=22, seed=0, massive=1):
    rows = dyadic(tokens, width, seed=seed)
    rows[:massive] *= 64
    return rows


def close(got, want, rtol=1e-8):
    largest = max(want.abs().nan_to_num(posinf=0).max().item(), 1e-300)
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-10 * largest, equal_nan=True)


@pytest.mark.parametrize(("shape", "offset"), [((60, 22), 0), ((90, 40), 1e4), ((60, 80), 1e4)])
@pytest.mark.parametrize("name", KERNELS)
def test_a_value_is_that_of_its_definition_also_far_from_the_origin(name, shape, offset):
    kernel, rows = KERNELS[name], (sample(*shape) + offset).float()
    got = kernel.function(rows, labels_of(rows))
    want = torch.as_tensor(kernel.definition(rows.double().numpy(), labels_of(rows).numpy()))
    about = float(kernel.equal == 1)  # a cosine far from the origin is 1 to seven digits
    close(got - about, want.double().reshape(got.shape) - about, rtol=1e-6)


@pytest.mark.parametrize("name", KERNELS)
@few_examples
@given(
    seed=seeds, tokens=st.integers(60, 90), width=st.integers(20, 24), power=st.integers(-40, 40)
)
def test_a_value_follows_scale_rotation_shift_and_order_of_the_rows(
    name, seed, tokens, width, power
):
    kernel = KERNELS[name]
    rows = sample(tokens, width, seed)
    labels, want = labels_of(rows), kernel.function(rows, labels_of(rows))
    assert want.isfinite().any()
    turn = torch.linalg.qr(normal(width, width, seed=seed + 1)).Q
    order = torch.randperm(tokens, generator=generator(seed))
    factor = 2.0 ** (power * kernel.scale)
    close(kernel.function(-(2.0**power) * rows, labels) / factor, want)
    close(kernel.function(rows @ turn, labels), want)
    moved = kernel.function(rows + 2.0**20, labels)
    if kernel.shift:
        close(moved, want, rtol=1e-6)
    else:
        assert not torch.allclose(moved, want, rtol=1e-6, equal_nan=True)
    close(kernel.function(rows[order], labels[order]), want[order] if kernel.by_row else want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_value_is_that_of_the_same_numbers_in_float64_and_the_rows_stay(name, dtype):
    kernel, rows = KERNELS[name], (200 * sample(massive=0) + 50).to(dtype)  # squares beyond float16
    before, labels = rows.clone(), labels_of(rows)
    got, want = kernel.function(rows, labels), kernel.function(before.double(), labels)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert torch.equal(rows, before)
    assert torch.equal(labels, labels_of(rows))


@pytest.mark.parametrize("tokens", [2, 3, 7, 60])
@pytest.mark.parametrize(
    "name", [name for name, kernel in KERNELS.items() if kernel.equal is not None]
)
def test_equal_rows_have_no_spread_to_the_last_digit(name, tokens):
    # In float64 the mean of equal rows need not round back to the row.
    kernel, rows = KERNELS[name], normal(1, 5).repeat(tokens, 1)
    labels = torch.arange(tokens) % 2 if tokens > 3 else torch.zeros(tokens, dtype=torch.int64)
    got = kernel.function(rows, labels)
    if name == "between sequences" and tokens <= 3:
        assert got.isnan()
    elif kernel.equal in (0, NAN):
        assert (got.isnan() if kernel.equal is NAN else got == 0).all()
    else:
        torch.testing.assert_close(got, torch.full_like(got, kernel.equal))


@pytest.mark.parametrize("block", [1, 37])
@pytest.mark.parametrize("name", KERNELS)
def test_the_size_of_a_block_changes_nothing(name, block, cut_blocks):
    kernel, rows = KERNELS[name], sample() + 3
    want = kernel.function(rows, labels_of(rows))
    cut_blocks(block)
    close(kernel.function(rows, labels_of(rows)), want)


def test_blocks_hold_as_many_whole_rows_as_fit(cut_blocks):
    cut_blocks(10)
    assert [rows_in_block(width, HOST) for width in (1, 3, 5, 10, 11, 99)] == [10, 3, 2, 1, 1, 1]
    rows = torch.arange(21.0).reshape(7, 3)
    assert [len(block) for block in row_blocks(rows)] == [3, 3, 1]


def shapes_refused(kernel):
    one_too_few = (kernel.least - 1, 3)
    if kernel.by_head:
        return [(4,), (0, 2, 3), (4, 0, 3), (4, 2, 0), (1, 4, 2, 3)]
    return [(4,), (2, 3, 4), (0, 3), one_too_few, (3, 0)]


# Their rows come from views that were checked.
UNCHECKED = {"mean of groups", "squares of groups", "cosine of groups"}


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - UNCHECKED))
def test_what_are_no_rows_is_refused_by_its_shape(name):
    kernel = KERNELS[name]
    for shape in shapes_refused(kernel):
        labels = torch.zeros(shape[:1], dtype=torch.int64)
        with pytest.raises(ValueError, match="expected") as caught:
            kernel.function(torch.ones(shape), labels)
        assert str(list(shape)) in str(caught.value)
    with pytest.raises(ValueError, match="floating-point"):
        kernel.function(torch.ones(40, 2, dtype=torch.int64), torch.zeros(40, dtype=torch.int64))


@pytest.mark.parametrize("name", DISTANCES)
@few_examples
@given(seed=seeds, points=st.integers(10, 60), power=st.sampled_from([0.25, 2.0, 5.0]))
def test_a_dimension_depends_on_ratios_alone(name, seed, points, power):
    estimate = DISTANCES[name]
    near = normal(points, 4, seed=seed).abs().add(0.01).sort(dim=1).values
    want = estimate(near)
    order = torch.randperm(points, generator=generator(seed))
    for other in (1e-12 * near, 1e12 * near, near[order]):
        close(estimate(other), want)
    close(estimate(near**power), want / power)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DISTANCES)
def test_a_dimension_is_that_of_the_same_distances_in_float64(name, dtype):
    near = (normal(300, 4).abs() + 0.5).sort(dim=1).values.to(dtype)
    before, got = near.clone(), DISTANCES[name](near)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, DISTANCES[name](near.double()), rtol=0, atol=0)
    assert torch.equal(near, before)


@pytest.mark.parametrize("name", DISTANCES)
def test_points_without_a_ratio_are_left_out_and_too_few_have_no_dimension(name):
    estimate = DISTANCES[name]
    near = normal(60, 4).abs().add(0.01).sort(dim=1).values
    odd = torch.tensor([[0.0, 0, 0, 0], [0, 0, 1, 2], [1, math.inf, math.inf, math.inf]])
    close(estimate(torch.cat([odd.double(), near])), estimate(near))
    for points in (0, 1, 2):
        assert estimate(torch.cat([near[:points], odd[:1].double()])).isnan().all()
    assert not estimate(near[:3]).isnan().all()
    # Roots of rounded sums: equal spacings differ in the last digit.
    lattice = torch.full((60, 4), 2.0, dtype=torch.float64).sqrt()
    beyond = torch.nextafter(lattice, torch.tensor(math.inf, dtype=torch.float64))
    lattice[:, 1:] = beyond[:, 1:]
    assert estimate(lattice).isinf().all()


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 0), (0,), (2, 5, 2), ()])
@pytest.mark.parametrize("name", DISTANCES)
def test_what_are_no_distances_is_refused_by_its_shape(name, shape):
    with pytest.raises(ValueError, match=r"expected distances \[tokens, k\]") as caught:
        DISTANCES[name](torch.ones(shape))
    assert str(list(shape)) in str(caught.value)
