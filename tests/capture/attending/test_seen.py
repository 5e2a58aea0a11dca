"""Which of the calls in a block is its attention."""

import itertools

import pytest
import torch

from geomon.capture.attending.attention import record_call
from geomon.capture.attending.fused import read_sdpa
from geomon.capture.attending.seen import Precedence, SeenAttention
from geomon.capture.tokens.sampling import RowSampler

QUERY = torch.randn(2, 4, 6, 8)
CALL = record_call(RowSampler(100, 0), read_sdpa({"query": QUERY, "key": QUERY}))
# From lowest to highest.
ORDER = [Precedence(*flags) for flags in itertools.product([False, True], repeat=4)]


def recorded(precedence: Precedence, *, refused: str = "", passed_over: str = "") -> SeenAttention:
    """An attention of which a call was recorded, or refused."""
    seen = SeenAttention()
    assert seen.takes(precedence)
    if refused:
        seen.refuse(refused)
    else:
        seen.call, seen.route = CALL, "sdpa"
        seen.max_logits.append(torch.zeros(2, 4, 6))
        seen.heads = "query", "key"
    seen.passed_over = passed_over
    return seen


def state(seen: SeenAttention) -> tuple:
    return seen.call, seen.route, seen.heads, len(seen.max_logits)


KEPT, DROPPED = (CALL, "sdpa", ("query", "key"), 1), (None, "", None, 0)


def test_a_call_from_the_attention_s_own_module_counts_most_and_one_without_products_least():
    names = ("made", "fused", "of_tokens", "inside")
    assert [Precedence(**{name: True}) for name in names] == [
        ORDER[1],
        ORDER[2],
        ORDER[4],
        ORDER[8],
    ]
    assert sorted(ORDER) == ORDER
    assert SeenAttention().precedence == ORDER[0]


@pytest.mark.parametrize("first", ORDER)
def test_of_several_calls_the_first_of_the_highest_precedence_counts(first):
    for other in ORDER:
        seen = recorded(first)
        assert seen.takes(other) == (other >= first)
        assert state(seen) == (DROPPED if other > first else KEPT)
        assert seen.precedence == max(first, other)
        assert recorded(first).awaits(other) == (other >= first)


@pytest.mark.parametrize("first", ORDER)
def test_a_reason_holds_until_a_call_comes_from_further_inside(first):
    for other in ORDER:
        seen = recorded(first, refused="a reason", passed_over="a softmax")
        assert state(seen) == DROPPED
        assert seen.awaits(other) == (other.inside > first.inside)
        assert seen.takes(other)
        kept = (seen.refused, seen.passed_over)
        assert kept == (("", "") if other.inside > first.inside else ("a reason", "a softmax"))
        assert seen.precedence == other


def test_a_refused_call_leaves_nothing_but_the_reason():
    seen = recorded(ORDER[3])
    seen.refuse("not understood")
    assert (seen.call, seen.route, seen.max_logits) == (None, "", [])
    assert seen.refused == "not understood"
    assert seen.precedence == ORDER[3]
