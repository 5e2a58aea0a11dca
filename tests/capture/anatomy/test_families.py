"""Which of several families of modules are the blocks: by attention, and by their size."""

import pytest
from torch import nn

from geomon.capture import find_anatomy
from geomon.capture.anatomy.families import leading_lists


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
    reason = "few parameters beside the largest stack"
    assert left_out == ([] if watched else [("other.#", 3, reason)])


def sublayer(*children):
    return nn.ModuleList([nn.LayerNorm(4), *children])


ATTENDING, MIXING = nn.MultiheadAttention(4, 2), nn.Linear(4, 40)


@pytest.mark.parametrize(
    ("other", "leads"),
    [
        (sublayer(MIXING, nn.Identity()), True),
        (sublayer(MIXING), False),  # nothing behind it that makes a sum
        (nn.ModuleList([MIXING]), False),
        (nn.Sequential(nn.LayerNorm(4), MIXING, nn.Identity()), False),  # a module of its own
    ],
)
def test_lists_begin_blocks_where_all_of_them_end_in_a_residual(other, leads):
    family = [sublayer(ATTENDING, nn.Identity()), other]
    assert leading_lists(family) == (family[:1] if leads else [])
