"""Attention of a block: the call that counts among several, and its projected queries and keys."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from geomon.capture.attending.attention import record_call
from geomon.capture.attending.fused import read_sdpa
from geomon.capture.attending.seen import Precedence, SeenAttention
from geomon.capture.tap import Columns, Projection
from geomon.capture.tap.columns import Pattern
from geomon.capture.tokens.sampling import RowSampler

QUERY = torch.randn(2, 4, 6, 8)
CALL = record_call(RowSampler(100, 0), read_sdpa({"query": QUERY, "key": QUERY}))
# From lowest to highest.
ORDER = [Precedence(*flags) for flags in itertools.product([False, True], repeat=4)]


def recorded(precedence: Precedence, *, refused: str = "", passed_over: str = "") -> SeenAttention:
    """An attention whose call was recorded or refused."""
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


# -- queries and keys as projected -----------------------------------------------------------------

SEQUENCES, LENGTH, TOKENS = 2, 3, 6
GENERATOR = torch.Generator().manual_seed(0)


def projection(*shape: int, features: tuple[int, ...] = (-1,), given: int = 1) -> Projection:
    values = torch.randn(shape, generator=GENERATOR).bfloat16()
    return Projection(values, features, (given, shape))


PLAIN = projection(SEQUENCES, LENGTH, 8)
MAPS = projection(7, 2, 5, features=(1, 2))  # whose features have two dimensions


def columns(projections=(PLAIN,), *, kinds=None, tokens=None, which=0, order=range(6), rows=None):
    """Two heads of three numbers, which stand in this order among the columns."""
    kinds = np.zeros((SEQUENCES, LENGTH), dtype=np.int64) if kinds is None else np.array(kinds)
    count = max(1, int(kinds.max()) + 1)
    own = np.arange(TOKENS).reshape(1, SEQUENCES, LENGTH)
    pattern = Pattern(
        which=np.broadcast_to(np.reshape(which, (-1, 1, 1)), (count, 2, 3)).copy(),
        columns=np.stack([np.array(order).reshape(2, 3) + n for n in range(count)]),
        kinds=kinds,
        rows=own if rows is None else np.array(rows).reshape(-1, SEQUENCES, LENGTH),
        tokens=None if tokens is None else np.array(tokens).reshape(SEQUENCES, LENGTH),
    )
    return Columns(tuple(projections), pattern)


TWO = {"projections": (PLAIN, MAPS), "rows": [[5, 4, 3, 2, 1, 0], [6, 1, 2, 3, 4, 5]]}
# Heads, and the share of the tokens whose heads are not known; a token may have none at all.
HEADS_OF = {
    "side by side": (columns(), 0),
    "behind others": (columns(order=range(2, 8)), 0),
    "interleaved": (columns(order=[0, 2, 4, 1, 3, 5]), 0),
    "of feature maps": (columns([MAPS], rows=[6, 0, 5, 1, 4, 2]), 0),
    "tokens in another order": (columns(tokens=[3, 0, 1, 5, 4, 2]), 0),
    "of two kinds": (columns(kinds=[[0, 1, 0], [1, 1, 0]], which=[0, 1], **TWO), 0),
    "of two kinds, the other first": (
        columns(kinds=[[1, 0, 1], [0, 0, 1]], which=[1, 0], order=[5, 3, 1, 0, 2, 4], **TWO), 0
    ),
    "some unknown": (columns(kinds=[[0, -1, 0], [0, 0, -1]]), 2 / 6),
    "some from elsewhere": (columns(tokens=[3, 0, -1, 5, -1, 2]), 0),
    "some unknown, some of no place": (
        columns(kinds=[[0, -1, 0], [0, 0, 0]], tokens=[3, 0, -1, 5, -1, 2]), 1 / 6
    ),
    "none known": (columns(kinds=[[-1] * 3] * 2), 1),
}  # fmt: skip
FROM_ELSEWHERE = ("some from elsewhere", "some unknown, some of no place")
DRAWN = torch.tensor([4, 1, 3, 5, 0, 2])


def expected_rows(heads: Columns, drawn, order) -> tuple[list[int], list[list[list[float]]]]:
    """The tokens whose heads are known, and these, number by number."""
    pattern, kept, values = heads.pattern, [], []
    for token in drawn.tolist():
        places = np.flatnonzero(np.array(order) == token)
        if len(places) == 0 or pattern.kinds.ravel()[places[0]] < 0:
            continue
        kind, place = pattern.kinds.ravel()[places[0]], places[0]
        rows = []
        for head in range(2):
            numbers = []
            for which, column in zip(
                pattern.which[kind, head], pattern.columns[kind, head], strict=True
            ):
                made, tokens = heads.projections[which].by_token
                flat = made.flatten(0, tokens - 1).flatten(1)
                numbers.append(float(flat[pattern.rows[which].ravel()[place], column]))
            rows.append(numbers)
        kept.append(token)
        values.append(rows)
    return kept, values


def projected(query, key, *, shape=(SEQUENCES, LENGTH), length_first=False, role="", count=TOKENS):
    """An attention of such heads, after its rows were copied, and what rows were asked for."""
    asked = []

    def rows(shape, role):
        asked.append((tuple(shape), role))
        return DRAWN[:count]

    seen = SeenAttention()
    seen.add_heads(query, key)
    seen.project(rows, shape, length_first=length_first, key_role=role, numbered=True)
    return seen, asked


@pytest.mark.parametrize("other", ["side by side", "some unknown"])
@pytest.mark.parametrize("way", HEADS_OF)
def test_sampled_rows_of_projections_are_copied_number_by_number(way, other):
    (heads, share), (others, also) = HEADS_OF[way], HEADS_OF[other]
    for place, pair in enumerate([(heads, others), (others, heads)]):
        seen, asked = projected(*pair)
        assert asked == [((SEQUENCES, LENGTH), "")] * 2
        found, tokens = seen.projected[place], heads.pattern.tokens
        order = np.arange(TOKENS) if tokens is None else tokens.ravel()
        kept, values = expected_rows(heads, DRAWN, order)
        assert found.indices.tolist() == kept
        assert found.values.dtype == torch.float32
        assert found.values.shape == (len(kept), 2, 3)
        assert found.values.tolist() == values
        assert (found.shape, found.role) == ((SEQUENCES, LENGTH), "")
        assert seen.left_out == pytest.approx(max(share, also))
        assert seen.heads is None
        assert seen.has_other_keys == (place == 1 and way in FROM_ELSEWHERE)


@pytest.mark.parametrize(
    ("shape", "length_first", "turned"),
    [
        ((LENGTH, SEQUENCES), False, True),
        ((LENGTH, SEQUENCES), True, True),
        ((SEQUENCES, LENGTH), True, False),
        ((TOKENS,), False, False),
    ],
)
def test_rows_are_turned_if_the_block_has_its_tokens_length_first(shape, length_first, turned):
    heads = columns(order=range(1, 7))
    seen, asked = projected(heads, heads, shape=shape, length_first=length_first, count=4)
    order = np.arange(TOKENS).reshape(LENGTH, SEQUENCES).T.ravel() if turned else np.arange(TOKENS)
    kept, values = expected_rows(heads, DRAWN[:4], order)
    for found in seen.projected:
        assert found.indices.tolist() == kept
        assert found.values.tolist() == values
        assert found.shape == (shape if turned else (SEQUENCES, LENGTH))
    assert asked == [(seen.projected[0].shape, "")] * 2


def test_keys_of_another_stack_have_rows_and_a_role_of_their_own():
    keys = columns(tokens=[3, 0, -1, 5, -1, 2], kinds=[[0, 0, -1], [0, 0, 0]])
    seen, asked = projected(columns(), keys, shape=(LENGTH, SEQUENCES), role="key")
    assert asked == [((LENGTH, SEQUENCES), ""), ((SEQUENCES, LENGTH), "key")]
    query, key = seen.projected
    assert (query.role, key.role) == ("", "key")
    kept, values = expected_rows(keys, DRAWN, np.arange(TOKENS))
    assert key.indices.tolist() == kept == [4, 1, 3, 5, 0]
    assert key.values.tolist() == values
    assert seen.left_out == pytest.approx(1 / 6)
    assert not seen.has_other_keys


def test_the_first_known_heads_are_kept_and_copied_once():
    seen, first, second = SeenAttention(), columns(), columns([projection(2, 3, 8, given=2)])
    for pair in ((None, None), (first, None), (None, first)):
        seen.add_heads(*pair)
        assert seen.heads is None
    seen.project(lambda shape, role: 1 / 0, (2, 3), length_first=False, key_role="", numbered=True)
    assert (seen.projected, seen.numbers) == (None, {})
    seen.add_heads(first, second)
    seen.add_heads(second, first)
    assert seen.heads == (first, second)
    assert seen.other_source
    own = SeenAttention()
    own.add_heads(first, columns([PLAIN]))
    assert not own.other_source


def test_repeated_heads_are_numbered_and_copied_once():
    once, twice = columns(), columns()
    pattern = twice.pattern
    twice = Columns(
        twice.projections,
        replace(pattern, which=pattern.which.repeat(2, 1), columns=pattern.columns.repeat(2, 1)),
    )
    seen, _ = projected(once, twice)
    assert seen.projected[1].values.shape == (TOKENS, 2, 3)
    assert torch.equal(seen.projected[1].values, seen.projected[0].values)
    assert seen.numbers == {"projected_query": (0, 3), "projected_key": (0, 3)}
    seen.number_heads(once, twice)
    assert (seen.numbers["query"], seen.numbers["key"]) == ((0, 3), (0, 3))
    unnumbered = SeenAttention()
    unnumbered.number_heads(None, None)
    unnumbered.add_heads(once, twice)
    unnumbered.project(
        lambda shape, role: DRAWN, (2, 3), length_first=False, key_role="", numbered=False
    )
    assert unnumbered.numbers == {}
