"""Products under settings of the training that round their factors."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import geomon.kernels
from support.hardware import ShortProducts
from support.kernels import as_factor, product_with_itself

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def expected(values: Tensor) -> Tensor:
    return values.double() @ values.double().T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("short", [None, torch.bfloat16])
def test_products_are_exact_to_float32_whatever_the_setting(dtype, short):
    values = torch.randn(80, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    with ShortProducts(short):
        found = as_factor(values) @ as_factor(values).T
    torch.testing.assert_close(found.double(), expected(values), rtol=1e-5, atol=1e-5)


def test_float64_serves_only_where_float32_is_rounded():
    values = torch.randn(4, 4)
    assert as_factor(values) is values
    with ShortProducts(torch.bfloat16):
        assert as_factor(values).dtype == torch.float64
        assert as_factor(values.half()).dtype == torch.float64
        assert as_factor(values.bfloat16()).dtype == torch.float32


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="torch 2.8")
def test_the_newer_interface_of_the_setting_is_read():
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(RuntimeError, match="legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert as_factor(torch.ones(2, 2)).dtype == torch.float64
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 5), (400, 130)])
def test_the_product_with_itself_is_the_product(shape):
    rows = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for some in (rows, rows.T):
        found = product_with_itself(some)
        torch.testing.assert_close(found, some.T @ some, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, found.T, rtol=1e-13, atol=1e-13)


def test_matrices_are_multiplied_by_torch_alone():
    """Threads of numpy's BLAS wait by running: next to torch's, a reading took twice as long."""
    calls = r"np\.(?:linalg|dot|matmul|einsum|tensordot|inner)\b.*"
    for file in Path(geomon.kernels.__file__).parent.glob("*.py"):
        found = re.findall(calls, file.read_text())
        assert not found, (file.name, found)
