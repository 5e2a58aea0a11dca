"""Which of several families of modules are the blocks: by attention, and by their size."""

import pytest
from torch import nn

from geomon.capture import find_anatomy
from geomon.capture.anatomy.families import LeftOut, leading_lists


def weights(count, each, attention):
    """Modules of `each` parameters, with a module called attention in them or without."""

    def member():
        inner = nn.Linear(each, 1, bias=False)
        return nn.ModuleDict({"attention" if attention else "mixing": nn.Sequential(inner)})

    return nn.ModuleList(nn.Sequential(member()) for _ in range(count))


@pytest.mark.parametrize(
    ("attention", "large", "small", "watched"),
    [
        (True, 2000, 100, True),  # a twentieth
        (True, 2000, 99, False),
        (False, 2000, 500, True),  # a quarter
        (False, 2000, 499, False),
    ],
)
def test_a_family_is_watched_from_a_twentieth_or_a_quarter_of_the_largest(
    attention, large, small, watched
):
    model = nn.ModuleDict(
        {"main": weights(3, large, attention), "other": weights(3, small, attention)}
    )
    anatomy = find_anatomy(model)
    assert [len(stack.blocks) for stack in anatomy.stacks] == ([3, 3] if watched else [3])
    left_out = [(x.pattern, x.count, x.reason) for x in anatomy.left_out]
    reason = "few parameters compared with the largest stack"
    assert left_out == ([] if watched else [("other.#", 3, reason)])


@pytest.mark.parametrize(("size", "large"), [(1000, True), (999, False)])
def test_a_family_without_attention_is_large_from_half_of_the_largest(size, large):
    single, empty = weights(1, 9000, False), nn.ModuleList([nn.Sequential(nn.ReLU())] * 2)
    parts = {"main": weights(3, 2000, True), "more2": weights(3, size, False)}
    left_out = find_anatomy(nn.ModuleDict(parts | {"one": single, "no": empty})).left_out
    reason = "no attention was found in them by name, but others have some"
    assert left_out == (LeftOut("more2.#", 3, reason, large),)


def convolutions(width, count=2):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width)) for _ in range(count)))


class Whole(nn.Module):
    """A member that is no mere container."""

    def __init__(self, held):
        super().__init__()
        self.held = held


@pytest.mark.parametrize(
    ("stages", "blocks"),
    [
        ([convolutions(8) for _ in range(3)], 6),
        ([convolutions(width) for width in range(2, 8)], 12),
        ([convolutions(width) for width in range(2, 9)], 0),  # too many for stages
        ([convolutions(2, 1), convolutions(4, 1)], 0),
        ([Whole(convolutions(width)) for width in (8, 9)], 4),
        ([Whole(convolutions(8)) for _ in range(3)], 0),  # all alike: blocks of two parts
        ([nn.Sequential(*convolutions(8), nn.Linear(8, 16)) for _ in range(2)], 4),  # half of each
        ([nn.Sequential(*convolutions(8), nn.Linear(8, 17)) for _ in range(2)], 0),
    ],
)
def test_stages_without_attention_hold_the_blocks_or_are_blocks_themselves(stages, blocks):
    found = [x.module for x in find_anatomy(nn.ModuleDict({"s": nn.ModuleList(stages)})).blocks]
    assert found == stages if not blocks else (len(found) == blocks and found[0] not in stages)


def sublayer(*children):
    return nn.ModuleList([nn.LayerNorm(4), *children])


class Residual(nn.Module):
    def forward(self, x, residual, scale=1.0):
        return residual + scale * x


ATTENDING, MIXING = nn.MultiheadAttention(4, 2), nn.Linear(4, 48)


@pytest.mark.parametrize(
    ("other", "leads"),
    [
        (sublayer(MIXING, Residual()), True),
        (sublayer(MIXING), False),  # nothing behind it that makes a sum
        (sublayer(MIXING, nn.Identity()), False),  # which is given one value
        (sublayer(MIXING, nn.ModuleList([Residual()])), False),  # not called
        (nn.ModuleList([MIXING]), False),
        (nn.Sequential(nn.LayerNorm(4), MIXING, Residual()), False),  # a module of its own
    ],
)
def test_lists_begin_blocks_where_all_of_them_end_in_a_residual(other, leads):
    family = [sublayer(ATTENDING, Residual()), other]
    assert leading_lists(family) == (family[:1] if leads else [])
