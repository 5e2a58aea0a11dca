import numpy as np
import pytest
import torch

from geomon.array_input import as_labels, as_rows

ROWS = np.random.default_rng(0).standard_normal((40, 6))


def read_only(rows):
    rows = rows.copy()
    rows.flags.writeable = False
    return rows


@pytest.mark.parametrize(
    "given",
    [
        ROWS.astype(">f8"), np.ascontiguousarray(ROWS[::-1])[::-1], np.asfortranarray(ROWS),
        read_only(ROWS), ROWS.tolist(), [*torch.tensor(ROWS).requires_grad_()],
        tuple(torch.tensor(ROWS)),
        torch.tensor(ROWS).to_sparse(),
        torch.complex(torch.tensor(ROWS), -torch.tensor(ROWS)).conj().imag,
    ],
    ids=range(9),
)  # fmt: skip
def test_the_same_numbers_in_any_container_are_the_same_rows(given):
    rows, precision = as_rows(given)
    assert torch.equal(rows, torch.tensor(ROWS))
    assert precision == torch.finfo(torch.float64).eps
    if isinstance(given, np.ndarray):
        rows.zero_()  # in memory of its own
        assert (given == ROWS).all()


def test_truth_values_and_whole_numbers_are_numbers():
    rows, _ = as_rows(np.array([[True, False], [False, False]]))
    assert rows.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert as_rows([[2**53 - 1, -7]])[0].tolist() == [[2.0**53 - 1, -7.0]]
    assert as_rows([[3], [4]])[0].tolist() == [[3.0], [4.0]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_short_numbers_keep_their_own_spacing(dtype):
    rows, precision = as_rows(torch.tensor(ROWS).to(dtype))
    assert torch.equal(rows.float(), torch.tensor(ROWS).to(dtype).float())
    assert precision == torch.finfo(dtype).eps
    assert rows.dtype == (torch.float32 if dtype.itemsize == 1 else dtype)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(9, 2, dtype=torch.complex64), "real hidden states, got torch.complex64"),
        (np.zeros((9, 2), dtype=complex), "view_as_real"),
        (torch.zeros(9, 0), r"width 1 or more, got \[9, 0\]"),
        (torch.zeros(9, 2, device="meta"), "meta tensor"),
        ([["a", "b"]] * 5, "array of <U1"),
        ([[1, 2], [1]], "is not an array: setting an array element with a sequence"),
        ([torch.ones(2, 3), torch.ones(4, 3)], r"shapes \[\(2, 3\), \(4, 3\)\]: .*torch.cat"),
        (None, "array of objects"),
        (np.zeros((5, 2), dtype="datetime64[s]"), "datetime64"),
        (np.zeros(5, dtype=[("a", "f4")]), "convert it to numbers first"),
        (ROWS.astype(object), "array of objects: convert it"),
        (ROWS.astype(np.longdouble), "convert it to numbers first"),
        (np.ma.masked_array(ROWS), r"masked array: pass array.filled\(numpy.nan\)"),
        (torch.tensor([[2**53, 0], [1, 2], [3, 4]]), "whole numbers below 2\\^53"),
    ],
    ids=range(14),
)
def test_what_cannot_be_read_is_refused_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        as_rows(given)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(3, 2), 0.1, 0, torch.qint8),
         r"got a quantised tensor: .* or hidden\.dequantize\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2, 3)]),
         r"got a nested tensor: .* torch\.cat\(hidden\.unbind\(\)\)"),
    ],
)  # fmt: skip
def test_other_kinds_of_tensors_are_refused_with_the_way_out(make, words):
    with pytest.raises(ValueError, match=words):
        as_rows(make())


IDS = np.arange(40) % 7 - 3


@pytest.mark.parametrize(
    "given",
    [
        IDS, IDS.astype(np.float16), IDS.astype(">i2"), IDS.tolist(),
        torch.tensor(IDS).reshape(4, 10),
    ],
    ids=range(5),
)  # fmt: skip
def test_whole_numbers_in_any_type_are_the_same_labels(given):
    assert torch.equal(as_labels("token_ids", given, 40), torch.tensor(IDS))


@pytest.mark.parametrize(
    "given",
    [
        np.array([0, 2**63, 2**64 - 1, 5], dtype=np.uint64),
        torch.tensor([0, 255, 7, 5], dtype=torch.uint8),
        np.array([2.0**53, 2.0**53 + 2, -1, 0]),
    ],
    ids=range(3),
)
def test_labels_that_differ_stay_different(given):
    assert len(as_labels("token_ids", given, 4).unique()) == 4


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ([1.0, 2.5, 3.0], "got 2.5 at row 1"),
        ([1.0, 2.0, np.nan], "got nan at row 2"),
        ([np.inf, 2.0, 3.0], "got inf at row 0"),
        ([2.0**63, 2.0, 3.0], "got 9.223372036854776e+18 at row 0"),
        ([1, 2.5, 3], "got 2.5 at row 1"),
        ([1, 2**63, -1], "at row 1"),
        ([1j, 2, 3], "at row 0"),
        (["a", "b", "a"], "return_inverse=True"),
    ],
    ids=range(8),
)
def test_labels_that_are_no_whole_numbers_are_refused(given, got):
    with pytest.raises(ValueError, match="expected positions as whole numbers") as caught:
        as_labels("positions", given, 3)
    assert got in str(caught.value)
