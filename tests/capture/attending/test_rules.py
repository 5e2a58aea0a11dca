"""Rules of places, by going through all pairs of a query and a key."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from geomon.capture.attending.rules import PlaceRule

CPU = torch.device("cpu")
SIDES = st.none() | st.integers(0, 5)


def ends_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


@given(keys=st.integers(1, 9), queries=st.integers(1, 6), left=SIDES, right=SIDES, data=st.data())
def test_a_query_sees_the_keys_within_its_window(keys, queries, left, right, data):
    offset = data.draw(st.integers(0, max(keys - queries, 0)))
    rule = PlaceRule(keys, CPU, left, right, offset)
    places = torch.tensor([[data.draw(st.integers(0, queries - 1)) for _ in range(3)]])
    seen = rule.visible(torch.tensor([0]), places)
    assert seen.shape == (1, 1, 3, keys)
    for number, place in enumerate(places[0].tolist()):
        at = place + offset
        expected = [
            (left is None or key >= at - left) and (right is None or key <= at + right)
            for key in range(keys)
        ]
        assert seen[0, 0, number].tolist() == expected


@given(keys=st.integers(1, 9), left=SIDES, right=SIDES, data=st.data())
def test_no_query_of_some_rows_sees_a_key_outside_their_reach(keys, left, right, data):
    start = data.draw(st.integers(0, keys - 1))
    stop = data.draw(st.integers(start + 1, keys))
    rule = PlaceRule(keys, CPU, left, right)
    first, end = rule.reach(slice(start, stop))
    assert 0 <= first < end <= keys
    seen = rule.visible(torch.tensor([0]), torch.arange(start, stop)[None]).any(2).flatten()
    inside = seen.nonzero().flatten().tolist()
    assert all(first <= key < end for key in inside)
    if inside:  # and no key too many
        assert (first, end) == (inside[0], inside[-1] + 1)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4),
    left=SIDES, right=SIDES,
)  # fmt: skip
def test_packed_queries_see_keys_of_their_own_sequence_at_whose_end_they_stand(
    lengths, left, right
):
    queries = [length for length, _ in lengths]
    keys = [length + more for length, more in lengths]  # keys of earlier passes come first
    rule = PlaceRule(sum(keys), CPU, left, right, ends=(ends_of(queries), ends_of(keys)))
    assert rule.reach(slice(0, 1)) == (0, sum(keys))
    places = torch.arange(sum(queries))[None]
    seen = rule.visible(torch.tensor([0]), places)[0, 0]
    query = 0
    for number, (own, all_keys) in enumerate(zip(queries, keys, strict=True)):
        before = sum(keys[:number])
        for place in range(own):
            at = before + all_keys - own + place
            expected = [
                before <= key < before + all_keys
                and (left is None or key >= at - left)
                and (right is None or key <= at + right)
                for key in range(sum(keys))
            ]
            assert seen[query].tolist() == expected
            query += 1
    starts = rule.begins(sum(queries))
    assert starts.nonzero().flatten().tolist() == ends_of(queries)[:-1].tolist()


def test_a_query_behind_the_last_sequence_sees_nothing_and_unpacked_rows_begin_once():
    ends = torch.tensor([0, 2, 3, 3])  # filled up with the last end
    rule = PlaceRule(5, CPU, ends=(ends, ends))
    seen = rule.visible(torch.tensor([0]), torch.tensor([[0, 2, 4]]))[0, 0]
    assert seen.tolist() == [[True, True, False, False, False], [False, False, True, False, False],
                             [False] * 5]  # fmt: skip
    assert rule.begins(5).tolist() == [True, False, True, True, False]
    assert PlaceRule(5, CPU).begins(3).tolist() == [True, False, False]
    assert PlaceRule(5, CPU, offset=1).begins(1).tolist() == [True]
