"""What was seen of an attention: columns of heads, rows of queries and keys as projected."""

import functools

import numpy as np
import pytest
import torch

from geomon.capture.attending import seen as module
from geomon.capture.attending.seen import SeenAttention
from geomon.capture.tap import Columns, Projection

HEADS, WIDTH = 3, 4
columns_of_all = functools.partial(module.columns_of_all, length_first=False)


def projection(*shape, seed=0, given=(1, (2, 5))):
    generator = torch.Generator().manual_seed(seed)
    return Projection(torch.randn(*shape, generator=generator), (-1,), given)


@pytest.mark.parametrize(
    ("shape", "entered", "sequences", "step"),
    [
        ((2, 5), (2, 5), 2, (5, 1)),
        ((5, 2), (2, 5), 2, (1, 2)),  # [length, batch]
        ((10,), (2, 5), 0, (0, 0)),
    ],
)
def test_heads_lie_one_after_another_in_the_columns_of_a_projection(
    shape, entered, sequences, step
):
    made = projection(*shape, HEADS * WIDTH)
    found = columns_of_all(made, shape, entered, HEADS, None, WIDTH)
    assert found.columns.tolist() == [[4 * h + c for c in range(WIDTH)] for h in range(HEADS)]
    assert not found.which.any()
    assert (found.projections, found.sequences, found.steps) == ((made,), sequences, (step,))


def test_heads_are_those_of_queries_or_of_keys_or_none():
    made = projection(2, 5, HEADS * WIDTH)

    def heads(*known):
        found = columns_of_all(made, (2, 5), (2, 5), *known)
        return None if found is None else len(found.which)

    assert heads(3, None, 4) == heads(9, 3, 4) == 3
    assert heads(6, 12, 2) == 6
    assert heads(5, 2, 4) is heads(3, 3, 5) is heads(None, 3, 4) is heads(3, 3, None) is None


@pytest.mark.parametrize(
    ("shape", "length_first"),
    [
        ((2, 5), False),
        ((5, 2), True),
        ((4, 4), False),
        ((4, 4), True),
        ((10, 1), True),
        ((1, 10), False),
    ],
)
def test_sampled_rows_are_those_of_the_projections(shape, length_first):
    columns_of_all = functools.partial(module.columns_of_all, length_first=length_first)
    query, key = projection(*shape, 12), projection(*shape, 8, seed=1)
    seen = SeenAttention()
    rows = torch.tensor([0, 3, 9, 4])
    seen.add_heads(
        columns_of_all(query, shape, shape, 3, 2, 4), columns_of_all(key, shape, shape, 3, 2, 4)
    )
    asked = []
    seen.project(
        lambda of, role: asked.append((of, role)) or rows, shape,
        length_first=length_first, key_role="",
    )  # fmt: skip
    assert asked == [(shape, ""), (shape, "")]
    for sampled, made, heads in zip(seen.projected, (query, key), (3, 2), strict=True):
        expected = made.by_token[0].reshape(-1, heads, 4)[rows]
        torch.testing.assert_close(sampled.values, expected, rtol=0, atol=0)
    assert seen.numbers == {"projected_query": (0, 4, 8), "projected_key": (0, 4)}
    assert seen.heads is None
    first = seen.projected
    seen.project(lambda *_: rows + 1, shape, length_first=length_first, key_role="")
    assert seen.projected is first


def test_keys_of_another_stack_have_rows_and_a_role_of_their_own():
    query, key = projection(2, 5, 8), projection(2, 7, 8, seed=1, given=(9, (2, 7)))
    seen = SeenAttention()
    seen.add_heads(
        columns_of_all(query, (2, 5), (2, 5), 2, 2, 4), columns_of_all(key, (2, 7), (2, 5), 2, 2, 4)
    )
    assert seen.other_source
    asked = []
    rows = torch.tensor([0, 8, 13])

    def choose(shape, role):
        asked.append((shape, role))
        return rows.clamp(max=shape[0] * shape[1] - 1)

    seen.project(choose, (2, 5), length_first=False, key_role="key")
    assert asked == [((2, 5), ""), ((2, 7), "key")]
    expected = key.by_token[0].reshape(14, 2, 4)[rows]
    torch.testing.assert_close(seen.projected[1].values, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "entered", "own"), [((10,), (2, 5), (10,)), ((2, 5), (10,), (2, 5))]
)
def test_rows_in_which_sequences_are_not_known_are_those_of_the_hidden_states(shape, entered, own):
    made = projection(*shape, 8)
    heads, seen, asked = columns_of_all(made, shape, entered, 2, 2, 4), SeenAttention(), []
    rows = torch.tensor([7, 0, 9])
    seen.add_heads(heads, heads)
    seen.project(lambda *of: asked.append(of) or rows, entered, length_first=False, key_role="key")
    assert asked == [(entered, ""), (own, "key")]
    for sampled in seen.projected:
        assert torch.equal(sampled.values, made.by_token[0].reshape(10, 2, 4)[rows])


@pytest.mark.parametrize("of", ["queries", "keys"])
def test_heads_of_projections_of_different_tokens_are_not_projected(of):
    one = columns_of_all(projection(2, 5, 8), (2, 5), (2, 5), 2, 2, 4)
    mixed = one._replace(
        projections=(*one.projections, projection(2, 6, 8)), steps=one.steps * 2,
        which=np.array([[0] * 4, [1] * 4]),
    )  # fmt: skip
    seen = SeenAttention()
    seen.add_heads(*((mixed, one) if of == "queries" else (one, mixed)))
    seen.project(lambda *_: torch.arange(3), (2, 5), length_first=False, key_role="")
    assert seen.projected is None
    assert not seen.numbers


def test_what_is_not_known_is_not_projected():
    made = columns_of_all(projection(2, 5, 8), (2, 5), (2, 5), 2, 2, 4)
    seen = SeenAttention()
    seen.add_heads(made, None)
    seen.add_heads(None, made)
    seen.project(lambda *_: torch.zeros(1).long(), (2, 5), length_first=False, key_role="")
    assert seen.projected is None
    assert not seen.numbers
    assert not seen.other_source
    unknown = columns_of_all(projection(2, 5, 8, given=None), (2, 5), (2, 5), 2, 2, 4)
    seen.add_heads(unknown, made)
    assert not seen.other_source


def test_repeated_keys_are_numbered_once_and_other_heads_are_added():
    made = projection(2, 5, 8)
    whole = columns_of_all(made, (2, 5), (2, 5), 2, 2, 4)
    repeated = whole._replace(
        which=whole.which.repeat(2, axis=0), columns=whole.columns.repeat(2, axis=0)
    )
    seen = SeenAttention()
    seen.number_heads(repeated, repeated)
    assert seen.numbers == {"query": (0, 0, 4, 4), "key": (0, 4)}
    first, second = (Columns(*part) for part in (
        (whole.projections, whole.which[:1], whole.columns[:1], whole.steps, 2),
        (whole.projections, whole.which[1:], whole.columns[1:], whole.steps, 2),
    ))  # fmt: skip
    seen.add_heads(first, second)
    seen.add_heads(second, first)
    for columns, order in zip(seen.heads, (1, -1), strict=True):
        np.testing.assert_array_equal(columns.columns, whole.columns[::order])


def test_a_refused_call_is_dropped_with_what_was_kept_of_it():
    seen = SeenAttention(call=object(), route="sdpa", max_logits=[torch.ones(1)])
    seen.refuse("several softmaxes")
    assert (seen.call, seen.route, seen.refused, seen.max_logits) == (
        None, "", "several softmaxes", [],
    )  # fmt: skip
