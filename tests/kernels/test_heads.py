import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.kernels.angles import cosine
from geomon.kernels.heads import head_anisotropy, head_cosine, mean_norm
from geomon.kernels.moments import drift_norm
from geomon.kernels.spectrum import anisotropy, spectrum

KERNELS = [mean_norm, head_cosine, head_anisotropy]
REFERENCES = {
    mean_norm: drift_norm,
    head_cosine: cosine,
    head_anisotropy: lambda rows: anisotropy(spectrum(rows)),
}
SHAPES = [(2, 1, 2), (500, 3, 16), (40, 12, 64), (7, 5, 1), (600, 2, 96)]

few_examples = settings(deadline=None, derandomize=True, max_examples=30)
small_shapes = st.tuples(
    st.integers(3, 20), st.integers(1, 4), st.integers(2, 8), st.integers(0, 10**6)
)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 2.0])
def test_each_head_by_itself_as_hidden_states_are(kernel, shape, offset):
    rows = normal(*shape) * torch.linspace(0.2, 2, shape[2]) + offset
    want = torch.stack([REFERENCES[kernel](rows[:, head]) for head in range(shape[1])])
    torch.testing.assert_close(kernel(rows), want, rtol=1e-9, atol=1e-12)


def test_head_cosine_agrees_with_all_pairs_one_by_one():
    rows = normal(80, 3, 5) + 1
    got = head_cosine(rows)
    for head in range(3):
        x = rows[:, head].numpy()
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        pairs = (x @ x.T)[np.triu_indices(80, k=1)]
        assert got[head].item() == pytest.approx(pairs.mean(), abs=1e-12)


def test_head_anisotropy_agrees_with_singular_values():
    rows = normal(300, 4, 24) * torch.linspace(0.1, 3, 24) + 7
    got = head_anisotropy(rows)
    for head in range(4):
        x = rows[:, head].numpy()
        s = np.linalg.svd(x - x.mean(axis=0), compute_uv=False)
        assert got[head].item() == pytest.approx(s[0] ** 2 / (s**2).sum(), rel=1e-10)


def test_heads_that_differ_are_told_apart():
    line = torch.linspace(-1, 1, 50, dtype=torch.float64)[:, None] * normal(1, 8)
    rows = torch.stack([line + 3, normal(50, 8), normal(1, 8).expand(50, -1)], dim=1)
    one, isotropic, equal = head_anisotropy(rows).tolist()
    assert one == pytest.approx(1)
    assert isotropic < 0.5
    assert math.isnan(equal)
    assert head_cosine(rows)[2].item() == pytest.approx(1)


def test_head_anisotropy_far_from_the_origin_where_float32_moments_lose_it():
    near = (normal(400, 2, 16) * 1024).round() / 1024
    far = (near + 1e6).double()
    mean = far.float().mean(dim=0)
    second = torch.einsum("thi,thj->hij", far.float(), far.float()) / 400
    naive = torch.linalg.eigvalsh(second - mean[:, :, None] * mean[:, None])
    assert (naive < 0).any()
    torch.testing.assert_close(head_anisotropy(far), head_anisotropy(near), rtol=1e-9, atol=0)


def test_rows_without_a_direction_are_left_out_of_the_head_they_are_in():
    rows = normal(30, 2, 6)
    rows[4:9, 0] = 0
    keep = torch.cat([rows[:4, 0], rows[9:, 0]])
    got = head_cosine(rows)
    torch.testing.assert_close(got[0], cosine(keep))
    torch.testing.assert_close(got[1], cosine(rows[:, 1]))
    rows[1:, 0] = 0
    got = head_cosine(rows)
    assert got[0].isnan()
    assert not got[1].isnan()


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_head_cosine_of_lengths_whose_squares_do_not_fit(scale):
    rows = normal(20, 2, 6)
    torch.testing.assert_close(head_cosine(scale * rows), head_cosine(rows), rtol=1e-10, atol=1e-12)


@given(small_shapes, st.sampled_from([2.0**-20, -3.0, 2.0**20]))
@few_examples
def test_heads_follow_scale_rotation_and_order_as_they_should(shape, scale):
    tokens, heads, width, seed = shape
    rows = normal(tokens, heads, width, seed=seed)
    turn = torch.linalg.qr(normal(heads, width, width, seed=seed + 1)).Q
    turned = torch.einsum("thi,hij->thj", rows, turn)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    head = torch.randperm(heads, generator=torch.Generator().manual_seed(seed))
    close = {"rtol": 1e-8, "atol": 1e-10}
    for kernel in KERNELS:
        want = kernel(rows)
        power = abs(scale) if kernel is mean_norm else 1
        torch.testing.assert_close(kernel(scale * rows) / power, want, **close)
        torch.testing.assert_close(kernel(turned), want, **close)
        torch.testing.assert_close(kernel(rows[order]), want, **close)
        torch.testing.assert_close(kernel(rows[:, head]), want[head], **close)


@given(small_shapes)
@few_examples
def test_heads_lie_in_their_ranges(shape):
    tokens, heads, width, seed = shape
    rows = normal(tokens, heads, width, seed=seed)
    assert (mean_norm(rows) >= 0).all()
    angles = head_cosine(rows)
    assert ((angles >= -1 / (tokens - 1) - 1e-12) & (angles <= 1 + 1e-12)).all()
    shares = head_anisotropy(rows)
    assert ((shares >= 1 / min(tokens, width) - 1e-12) & (shares <= 1 + 1e-12)).all()


def test_one_token_has_a_mean_and_nothing_else():
    rows = normal(1, 3, 4)
    torch.testing.assert_close(mean_norm(rows), rows[0].norm(dim=1))
    assert head_cosine(rows).isnan().all()
    assert head_anisotropy(rows).isnan().all()


@pytest.mark.parametrize("tokens", [2, 3, 7, 1000])
def test_equal_rows_have_no_anisotropy(tokens):
    assert head_anisotropy(normal(1, 3, 4).expand(tokens, -1, -1)).isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_heads_take_any_floating_dtype_and_leave_it_alone(kernel, dtype):
    rows = (1000 * normal(60, 3, 8)).to(dtype)  # squares overflow float16
    before = rows.clone()
    got = kernel(rows)
    assert got.dtype == torch.float64
    assert got.shape == (3,)
    assert torch.equal(rows, before)
    torch.testing.assert_close(got, kernel(rows.double()), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "rows",
    [
        torch.ones(4),
        torch.ones(4, 2),
        torch.ones(0, 2, 3),
        torch.ones(4, 0, 3),
        torch.ones(4, 2, 0),
        torch.ones(1, 4, 2, 3),
        torch.ones(4, 2, 3, dtype=torch.int64),
    ],
)
def test_heads_name_what_they_cannot_use(kernel, rows):
    with pytest.raises(ValueError, match=r"\[tokens, heads, head width\]") as caught:
        kernel(rows)
    assert f"{rows.dtype} {list(rows.shape)}" in str(caught.value)
