"""A recorded call of fused attention is held against the output of its operator."""

import math

import pytest
import torch
from torch import Tensor

from geomon.capture.attending.attention import Arguments, record_call
from geomon.capture.attending.proof import refute
from geomon.capture.tokens.sampling import RowSampler

SEQUENCES, HEADS, KEY_HEADS, QUERIES, KEYS, WIDTH = 3, 4, 2, 12, 14, 6
GENERATOR = torch.Generator().manual_seed(0)
SOME = torch.rand(SEQUENCES, 1, QUERIES, KEYS, generator=GENERATOR) > 0.4
SOME[..., 0] = True
SOME[:, :, 1] = False  # a row that sees no key
BIAS = torch.randn(1, HEADS, QUERIES, KEYS, generator=GENERATOR)

GIVEN = {
    "all keys": {},
    "causal": {"causal": True},
    "a mask": {"mask": SOME},
    "a mask of keys": {"mask": SOME[:, :, :1]},
    "a bias": {"mask": BIAS},
    "a cap": {"softcap": 0.7},
    "a cap and a bias": {"softcap": 0.7, "mask": BIAS},
}


def arguments(**options) -> Arguments:
    query = torch.randn(SEQUENCES, HEADS, QUERIES, WIDTH, generator=GENERATOR)
    key = torch.randn(SEQUENCES, KEY_HEADS, KEYS, WIDTH, generator=GENERATOR)
    return Arguments(**{"query": query, "key": key, "mask": None, "causal": False, "scale": 0.6}
                     | options)  # fmt: skip


def output_of(given: Arguments, value: Tensor) -> Tensor:
    """The output by definition, in float64."""
    key, value = (x.double().repeat_interleave(HEADS // x.shape[1], 1) for x in (given.key, value))
    scores = given.scale * given.query.double() @ key.mT
    cap, mask = given.softcap, given.mask
    scores = scores if cap is None else cap * (scores / cap).tanh()
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    elif mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if given.causal:
        later = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1).nan_to_num() @ value


def recorded(given: Arguments, *, value_heads: int = KEY_HEADS, rows: int = 1000):
    """A recorded call, values, and the output that they give."""
    value = torch.randn(SEQUENCES, value_heads, KEYS, WIDTH, generator=GENERATOR)
    return record_call(RowSampler(rows, 0), given), value, output_of(given, value)


@pytest.mark.parametrize("value_heads", [1, KEY_HEADS, HEADS])
@pytest.mark.parametrize("way", GIVEN)
def test_an_output_that_follows_from_what_was_read_is_not_refuted(way, value_heads):
    call, value, output = recorded(arguments(**GIVEN[way]), value_heads=value_heads)
    assert refute(call, value, output.float()) == ""


@pytest.mark.parametrize("way", GIVEN)
def test_what_was_read_wrong_is_refuted(way):
    given = arguments(**GIVEN[way])
    call, value, output = recorded(given)
    for name, other in (
        ("query", given.query * 1.1), ("key", given.key.roll(1, dims=2)), ("scale", 0.5),
        ("softcap", 0.3), ("causal", not given.causal), ("mask", BIAS.flip(3)),
    ):  # fmt: skip
        wrong = record_call(RowSampler(1000, 0), given._replace(**{name: other}))
        assert "another output than its operator returned" in refute(wrong, value, output.float())
    assert refute(call, value.flip(1), output.float())


def moved(call, value: Tensor, output: Tensor, query: int, by: float) -> Tensor:
    """The output with one number moved by a share of the largest value, at a sampled query."""
    sequence = int(call.sequences[0])
    place, other = (sequence, 2, int(call.places[0, query]), 1), output.clone()
    largest = float(value[sequence].abs().amax())
    other[place] += math.copysign(by * largest, float(other[place]))
    return other


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 1e-4), (torch.float16, 32 * 2**-10), (torch.bfloat16, 32 * 2**-7)],
)
def test_an_output_may_differ_by_rounding(dtype, limit):
    """By so much of the largest value: a ten-thousandth, or more in a shorter type."""
    call, value, output = recorded(arguments())
    for share, is_refuted in ((0.9, False), (1.1, True)):
        other = moved(call, value, output, 3, share * limit).to(dtype)
        assert bool(refute(call, value, other)) == is_refuted


def test_the_reason_says_by_how_much_the_outputs_differ():
    call, value, output = recorded(arguments())
    assert refute(call, value, moved(call, value, output, 0, 0.03).float()) == (
        "what was read of the attention (queries, keys, mask, scale) gives another output than its "
        "operator returned: they differ by 0.03 of the largest value"
    )


def test_a_few_sampled_queries_of_one_sequence_are_looked_at():
    """A query that is not sampled, and one behind the first 8, may have any output."""
    call, value, output = recorded(arguments(), rows=2 * QUERIES)
    first = int(call.sequences[0])
    for query in range(call.places.shape[1]):
        found = refute(call, value, moved(call, value, output, query, 1.0).float())
        assert bool(found) == (query < 8)
    others = torch.randn(output.shape, generator=GENERATOR)
    others[first] = output[first]
    assert refute(call, value, others) == ""


def test_the_output_of_a_query_that_sees_no_key_does_not_count():
    call, value, output = recorded(arguments(mask=SOME))
    output[:, :, 1] = 9
    assert refute(call, value, output.float()) == ""
    output[:, :, 2] = 9
    assert refute(call, value, output.float())
