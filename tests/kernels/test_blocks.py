"""What every kernel asks of its rows, and how rows are cut into blocks."""

import pytest
import torch

from geomon.kernels import _blocks, spectrum_summary
from geomon.kernels._blocks import (
    as_factor,
    product_with_itself,
    require_rows,
    row_blocks,
    rows_in_block,
)


@pytest.mark.parametrize(
    "hidden",
    [
        torch.ones(3, 2, dtype=torch.int64),  # a matrix of another kind
        torch.ones(3, 2, dtype=torch.bool),
        torch.ones(3),  # of the right kind, and no matrix
        torch.ones(2, 3, 2),
        torch.ones(3, dtype=torch.int64),
    ],
    ids=lambda hidden: f"{hidden.dtype} {list(hidden.shape)}",
)
def test_only_a_floating_point_matrix_has_rows(hidden):
    with pytest.raises(ValueError, match=r"expected a floating-point tensor \[tokens, width\]"):
        require_rows(hidden)


@pytest.mark.parametrize("shape", [(0, 2), (2, 2), (3, 0)])
def test_too_few_rows_or_columns_are_refused(shape):
    with pytest.raises(ValueError, match="expected at least 3 rows and 1 column"):
        require_rows(torch.ones(shape), at_least=3)


def test_rows_that_suffice_are_returned_as_they_are():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        rows = torch.ones(3, 1, dtype=dtype)
        assert require_rows(rows, at_least=3) is rows


def test_blocks_hold_as_many_whole_rows_as_fit(monkeypatch):
    monkeypatch.setattr(_blocks, "BLOCK", 10)
    assert [rows_in_block(width) for width in (1, 3, 5, 10, 11, 99)] == [10, 3, 2, 1, 1, 1]
    rows = torch.arange(21.0).reshape(7, 3)
    assert [len(block) for block in row_blocks(rows)] == [3, 3, 1]
    assert torch.equal(torch.cat(row_blocks(rows)), rows)


@pytest.mark.parametrize(
    "rows", [torch.ones(3, 2, dtype=torch.int64), torch.ones(3), torch.ones(2, 3, 4)]
)
def test_rows_are_a_matrix_and_floating_point(rows):
    with pytest.raises(ValueError, match="expected a floating-point tensor"):
        require_rows(rows)


def by_the_older_setting():
    torch.set_float32_matmul_precision("medium")


def by_the_newer_setting():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def by_both():
    by_the_older_setting()
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="torch 2.8")
@pytest.mark.parametrize("shorten", [by_the_older_setting, by_the_newer_setting, by_both])
def test_factors_are_float64_where_the_host_would_shorten_them(shorten):
    rows = torch.ones(2, 2)
    assert as_factor(rows) is rows
    try:
        shorten()
        assert as_factor(rows).dtype == torch.float64
        assert spectrum_summary.summarise_spectrum(rows).is_whole
        wide = torch.randn(1030, 1030, generator=torch.Generator().manual_seed(0))
        # The rows of wide layers are centred in the type that their products are exact in.
        assert spectrum_summary._centred(wide)[0].dtype == torch.float64
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert as_factor(rows) is rows


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 5), (400, 130)])
def test_the_product_with_itself_is_the_product(shape):
    rows = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for some in (rows, rows.T):
        found = product_with_itself(some)
        torch.testing.assert_close(found, some.T @ some, rtol=1e-12, atol=1e-12)
        assert torch.equal(found, found.T)
