"""Rows that outlive a pass lie apart from the heap, and are what plain indexing gives."""

import sys
import threading

import pytest
import torch

from geomon.capture import apart
from support.models import PlainDecoder, transformer
from support.watched import window

WIDTH, LENGTH, SEQUENCES = 64, 128, 16  # a hidden state of all tokens takes 0.5 MB


def blocks_of(values, **shape):
    return values.unflatten(-1, (4, -1)).transpose(1, 2)


LAYOUTS = {
    "rows": torch.randn(4096, WIDTH),
    "columns": torch.randn(4096, 3 * WIDTH)[:, WIDTH : 2 * WIDTH],
    "heads": blocks_of(torch.randn(SEQUENCES, LENGTH, WIDTH)),
    "fused": blocks_of(torch.randn(SEQUENCES, LENGTH, 3 * WIDTH).chunk(3, dim=-1)[1]),
    "length first": torch.randn(LENGTH, SEQUENCES, 4, 16).permute(1, 2, 0, 3),
    "repeated": torch.randn(SEQUENCES, 1, LENGTH, WIDTH).expand(-1, 4, -1, -1),
    "half": torch.randn(4096, WIDTH).bfloat16(),
    "mask": torch.rand(SEQUENCES, 1, LENGTH, LENGTH) > 0.5,
    "with gradients": torch.randn(4096, WIDTH, requires_grad=True),
    "short": torch.randn(8, 2),
}


@pytest.mark.parametrize("values", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("of", ["all", "some", "none"])
def test_entries_are_those_of_plain_indexing_with_its_strides(values, of):
    count = {"all": len(values), "some": len(values) // 2, "none": 0}[of]
    places = torch.randperm(len(values))[:count]
    found, expected = apart.select(values, places), values[places]
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride() or not count
    kept = apart.keep(expected)
    assert torch.equal(kept, expected)


def test_tensors_do_not_share_memory_and_keep_theirs():
    made = [apart.keep(torch.full((1 << 16,), float(n))) for n in range(300)]  # two chunks and more
    del made[::3]
    made += [apart.keep(torch.full(((1 << 24) + 1,), 1000.0))]  # longer than a chunk
    made += [apart.keep(torch.full((1 << 16,), 1001.0 + n)) for n in range(3)]
    values = [float(x[0]) for x in made]
    assert len(set(values)) == len(values)
    assert all((x == value).all() for x, value in zip(made, values, strict=True))


@pytest.mark.parametrize(("numbers", "is_copied"), [(1 << 16, True), ((1 << 16) - 1, False)])
def test_tensors_of_a_quarter_of_a_mebibyte_are_kept_apart_and_shorter_ones_stay(
    numbers, is_copied
):
    made = torch.arange(numbers).float()
    kept = apart.keep(made)
    assert (kept is made) is not is_copied
    assert torch.equal(kept, made)
    elsewhere = made.to("meta")
    assert apart.keep(elsewhere) is elsewhere


def test_numbers_are_converted_unless_they_are_of_that_type():
    made = torch.randn(8)
    assert apart.convert(made) is made
    found = apart.convert(made.double())
    assert found.dtype == torch.float32
    assert torch.equal(found, made)


def test_places_lie_one_after_another_until_a_chunk_is_full():
    """In a thread of its own, whose chunk nobody has begun to fill."""
    found = []

    def fill():
        made = [apart.empty([1 << 16], torch.float32, torch.device("cpu")) for _ in range(256)]
        made += [
            apart.empty([n], torch.int8, torch.device("cpu")) for n in ((1 << 18) + 1, 1 << 18)
        ]
        found.extend(x.data_ptr() for x in made)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    starts = [address - found[0] for address in found]
    assert starts[:256] == [*range(0, 1 << 26, 1 << 18)]
    assert starts[256] not in range(1 << 26)
    assert starts[257] - starts[256] == (1 << 18) + 64
    assert found[0] % 64 == 0


def heap() -> range:
    """The addresses of the heap."""
    with open("/proc/self/maps") as maps:
        bounds = next(line.split()[0] for line in maps if line.endswith("[heap]\n"))
    low, high = (int(bound, 16) for bound in bounds.split("-"))
    return range(low, high)


@pytest.mark.skipif(sys.platform != "linux", reason="only the kernel of Linux tells the heap")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("plain", torch.float32), ("plain", torch.bfloat16), ("gpt2", torch.float32),
     ("llama", torch.float32), ("by hand", torch.float32)],
)  # fmt: skip
def test_rows_that_outlive_a_pass_are_not_in_the_heap_with_its_activations(kind, dtype):
    torch.empty(31 << 20, dtype=torch.uint8)  # once it is freed, glibc maps longer tensors only
    if torch.empty(1 << 20, dtype=torch.uint8).data_ptr() not in heap():
        pytest.skip("this C library keeps long tensors apart itself")
    if kind == "plain":
        model, size = PlainDecoder(WIDTH, length=LENGTH).to(dtype), (SEQUENCES, LENGTH)
    else:
        model = transformer(*(("gpt2", "eager") if kind == "by hand" else (kind,)))
        size = (64, 64)
    with window(model) as seen:
        model(torch.randint(0, 50, size))
    in_heap = {
        f"{layer.index} {name}": value.nbytes
        for layer in seen.snapshot().layers
        for name, value in layer.captured.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        and value.untyped_storage().nbytes() >= 1 << 18 and value.data_ptr() in heap()
    }  # fmt: skip
    assert not in_heap
