"""Requirements of every kernel of rows or distances on its input; blocks, and equal rows.

The contract of the metrics (tests/metrics/test_contract.py) holds for their kernels.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import definitions as by_book
from support.kernels import (
    HOST,
    anisotropy,
    cosine_centred,
    effective_rank,
    expert_loads,
    gride,
    group_sums,
    head_axes,
    isotropic_anisotropy,
    isotropic_cosine_magnitude,
    isotropic_cosine_quantile,
    isotropic_spectrum,
    leading_share,
    local_anisotropy,
    local_dimension,
    nearest,
    ordinary_rows,
    participation_ratio,
    power_law,
    principal_axes,
    qk_cosine,
    qk_dot,
    row_blocks,
    rows_in_block,
    share_beyond,
    spectrum,
    squares_about_mean,
    token_types,
    twonn,
)
from support.samples import dyadic, few_examples, generator, normal, seeds


@dataclass(frozen=True)
class Kernel:
    """A kernel of rows and of a label for each.

    Attributes:
        function: Takes rows [tokens, width] and labels [tokens].
        equal: Its value if all rows are equal, or None if that depends on the row.
        least: Fewest rows that it takes.
        by_head: Whether it takes rows by head.
    """

    function: Callable
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


NAN = math.nan
KERNELS = {
    "cosine_centred": Kernel(lambda x, _: cosine_centred(x), NAN, least=2),
    "squares_about_mean": Kernel(lambda x, _: squares_about_mean(x), 0),
    "spectrum": Kernel(lambda x, _: spectrum(x), 0),
    "principal_axes": Kernel(lambda x, s: principal_axes(x, s, 5).eigenvalues, 0),
    "anisotropy": Kernel(lambda x, _: anisotropy(spectrum(x)), NAN),
    "effective_rank": Kernel(lambda x, _: effective_rank(spectrum(x)), NAN),
    "participation_ratio": Kernel(lambda x, _: participation_ratio(spectrum(x)), NAN),
    "power_law": Kernel(lambda x, _: torch.stack(power_law(spectrum(x))), NAN),
    "ordinary_rows": Kernel(lambda x, _: ordinary_rows(x).double(), 1),
    "share_beyond": Kernel(lambda x, _: share_beyond(squares_about_mean(x), ordinary_rows(x)), NAN),
    "nearest": Kernel(lambda x, _: nearest(x, 2).distances, 0, least=2),
    "within_variance": Kernel(lambda x, t: token_types(x, t).within_variance, 0),
    "norm_variance_slope": Kernel(slope),
    "head_axes": Kernel(
        heads(lambda x: leading_share(head_axes(x, one_group(x), 1).eigenvalues)), NAN,
        by_head=True,
    ),
    "mean of groups": Kernel(lambda x, s: of_sums("mean")(x, s).norm(dim=1)),
    "squares of groups": Kernel(of_sums("square")),
    "cosine of groups": Kernel(of_sums("cosine"), 1),
}  # fmt: skip
DISTANCES = {
    "twonn": lambda near: torch.stack([*twonn(near)]),
    "gride": lambda near: gride(near, [1, 2]),
}


def close(got, want, rtol=1e-8):
    largest = max(want.abs().nan_to_num(posinf=0).max().item(), 1e-300)
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-10 * largest, equal_nan=True)


# Definitions by the book, as functions of rows and labels; sizes on either side of the smaller Gram
# matrix, of the rank to which a power law is fitted, and of the blocks and searches of large
# readings.
DEFINED = {
    "spectrum": lambda x, _: by_book.eigenvalues(x)[: min(x.shape)],
    "anisotropy": lambda x, _: by_book.shares(x)[0],
    "effective_rank": lambda x, _: by_book.effective_rank(x),
    "participation_ratio": lambda x, _: by_book.participation_ratio(x),
    "power_law": lambda x, _: by_book.fitted_law(x),
    "cosine_centred": lambda x, _: by_book.mean_cosine(by_book.centred(x)),
    "squares_about_mean": lambda x, _: by_book.squares(x),
    "ordinary_rows": lambda x, _: by_book.are_ordinary(x),
    "share_beyond": lambda x, _: by_book.massive_share(x),
    "nearest": lambda x, _: by_book.distances(x)[:, :2],
    "within_variance": by_book.within_variance,
    "norm_variance_slope": by_book.fitted_types,
}


@pytest.mark.parametrize("offset", [0, 1024])
@pytest.mark.parametrize("size", [(500, 64), (64, 64), (200, 26), (64, 300), (1200, 130)])
@pytest.mark.parametrize("name", DEFINED)
def test_a_kernel_is_its_definition_at_every_size(name, size, offset):
    rows = dyadic(*size) * torch.arange(1, size[1] + 1) ** -0.5
    rows = (rows * 1024).round() / 1024 + offset
    rows[3] += 200.0
    labels = torch.arange(size[0]) % 6
    got = KERNELS[name].function(rows, labels).double()
    want = torch.as_tensor(DEFINED[name](rows.numpy(), labels.numpy()), dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9 * want.abs().max().item())


@pytest.mark.parametrize("tokens", [2, 3, 7, 60])
@pytest.mark.parametrize(
    "name", [name for name, kernel in KERNELS.items() if kernel.equal is not None]
)
def test_equal_rows_have_no_spread_to_the_last_digit(name, tokens):
    # In float64 the mean of equal rows need not round back to the row.
    kernel, rows = KERNELS[name], normal(1, 5).repeat(tokens, 1)
    labels = torch.arange(tokens) % 2 if tokens > 3 else torch.zeros(tokens, dtype=torch.int64)
    got = kernel.function(rows, labels)
    if kernel.equal in (0, NAN):
        assert (got.isnan() if kernel.equal is NAN else got == 0).all()
    else:
        torch.testing.assert_close(got, torch.full_like(got, kernel.equal))


@pytest.mark.parametrize("block", [1, 37])
@pytest.mark.parametrize("name", KERNELS)
def test_the_size_of_a_block_changes_nothing(name, block, cut_blocks):
    function, rows, labels = KERNELS[name].function, dyadic(60, 22) + 3, torch.arange(60) % 3
    rows[0] *= 64
    before, want = rows.clone(), function(rows, labels)
    cut_blocks(block)
    close(function(rows, labels), want)
    assert torch.equal(rows, before)
    assert torch.equal(labels, torch.arange(60) % 3)


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
def test_a_tensor_that_is_not_rows_is_refused_by_its_shape(name):
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
def test_a_tensor_that_is_not_distances_is_refused_by_its_shape(name, shape):
    with pytest.raises(ValueError, match=r"expected distances \[tokens, k\]") as caught:
        DISTANCES[name](torch.ones(shape))
    assert str(list(shape)) in str(caught.value)


def by_chance(shape, upper):
    return torch.randint(upper, shape, generator=generator(1))


NINE_POINTS, FLAT, SAME = torch.ones(9, 3), torch.ones(200), torch.arange(40) % 4
# Ids that come 9, 10, 100,000 and 100,001 times: of two types, too few for a slope.
RARE_AND_COMMON = torch.arange(4).repeat_interleave(torch.tensor([9, 10, 100_000, 100_001]))
ONE_SET = torch.arange(9)[None]
# Calls and what they give: where a direction, a token or a neighbour is missing, and least sizes.
CLOSED = [
    (lambda: qk_cosine(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.ones(2, 2)), [NAN, 1]),
    (lambda: qk_dot(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.ones(2, 2)), [0, 2]),
    (lambda: cosine_centred(torch.tensor([[0.0], [1.0], [0.0], [-1.0]])), [-1]),
    (lambda: expert_loads(torch.tensor([0.0, 30, 10, 20])), [0.01, 2, 2 / 3, 4 / 3]),
    (lambda: expert_loads(torch.zeros(2)), [NAN, NAN]),
    (lambda: power_law(torch.arange(1.0, 19)), [NAN, NAN]),
    (lambda: power_law(torch.arange(1.0, 20)).alpha.isfinite().int(), [1]),  # ranks 11 to 15
    (lambda: power_law(FLAT).alpha.round(decimals=12), [0]),
    (lambda: power_law(0 * FLAT).alpha, [NAN]),
    (lambda: slope(torch.zeros(40, 3), SAME)[:1], [NAN]),
    (lambda: slope(normal(len(RARE_AND_COMMON), 1), RARE_AND_COMMON)[:4],
     [NAN, NAN, 2, 100_010 / len(RARE_AND_COMMON)]),
    (lambda: local_dimension(normal(5, 3), by_chance((2, 2), 5)), [NAN, NAN]),
    (lambda: local_dimension(NINE_POINTS, ONE_SET), [NAN]),
    (lambda: local_dimension(normal(5, 3), torch.zeros(0, 5, dtype=torch.int64)), []),
    (lambda: local_anisotropy(NINE_POINTS, ONE_SET), [NAN]),
    (lambda: local_anisotropy(normal(5, 3), torch.zeros(2, 0, dtype=torch.int64)), [NAN, NAN]),
    *((lambda width=width: isotropic_cosine_magnitude(width), [value])
      for width, value in ((1, 1), (2, 2 / math.pi), (3, 1 / 2))),
    (lambda: round(isotropic_cosine_magnitude(4096), 5), [0.01247]),
    (lambda: isotropic_anisotropy(2, 1), [1]),
    (lambda: len(isotropic_spectrum(2, 3)), [1]),
    (lambda: [isotropic_cosine_quantile(2, p) for p in (0, 1)], [-1, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "expected"), CLOSED)
def test_closed_forms(call, expected):
    assert np.ravel(call()).tolist() == pytest.approx(expected, nan_ok=True)


Q_AND_K = [
    ((4, 8), (4, 7)), ((4, 8), (3, 8)), ((2, 8), (4, 8)), ((4, 8), (0, 8)), ((8,), (8,)),
    ((5, 4, 8), (3, 4, 8)),
]  # fmt: skip
RANKS = (anisotropy, effective_rank, participation_ratio, power_law)
# Calls, and words of their errors.
REFUSED = [
    *((lambda q=q, k=k: qk_cosine(torch.ones(q), torch.ones(k)),
       f"expected mean queries .*{[*q]} and {[*k]}") for q, k in Q_AND_K),
    *((lambda kernel=kernel, shape=shape: kernel(torch.ones(shape)),
       f"expected eigenvalues [rank], got {[*shape]}")
      for kernel in RANKS for shape in ((0,), (2, 2), ())),
    *((lambda ids=ids: token_types(torch.ones(4, 2), ids),
       f"a token id for each of 4 rows.*{ids.dtype} {[*ids.shape]}")
      for ids in (torch.zeros(3).long(), torch.zeros(4, 1).long(), torch.zeros(4))),
    (lambda: token_types(normal(9, 2), torch.arange(9) % 3).without(0), "pass groups"),
    (lambda: group_sums(torch.zeros(5, 2, 3), one_group(range(4))),
     "a group for each of 5 rows, got 4"),
    *((lambda scales=scales: gride(torch.ones(10, 2), scales), f"1 or more, got {scales}")
      for scales in ([0], [1, -1])),
    (lambda: local_dimension(normal(5), ONE_SET), "expected a floating-point tensor"),
    (lambda: local_dimension(normal(5, 2), ONE_SET.double()), "indices of rows"),
    (lambda: local_anisotropy(normal(5, 2), torch.arange(5)), "indices of rows"),
    *((lambda n=n, w=w, f=f: f(n, w), f"at least 2 tokens and width 1, got {n} and {w}")
      for f in (isotropic_anisotropy, isotropic_spectrum) for n, w in ((1, 3), (3, 0))),
    (lambda: isotropic_cosine_quantile(1), "at least 2, got 1"),
    *((lambda p=p: isotropic_cosine_quantile(5, p), "must be in ") for p in (-0.1, 1.1)),
    (lambda: isotropic_cosine_magnitude(0), "a width of at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_an_input_that_cannot_be_measured_is_named(call, words):
    with pytest.raises(ValueError, match=re.sub(r"([\[\]])", r"\\\1", words)):
        call()


def test_the_gradient_of_the_centred_cosine_is_that_of_its_definition():
    """It was 0 when rows with a number of 1 or more were scaled."""
    assert torch.autograd.gradcheck(cosine_centred, (normal(9, 3) + 2).requires_grad_())
