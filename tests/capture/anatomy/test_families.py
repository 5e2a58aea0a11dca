import pytest
from models import PlainDecoder
from torch import nn

from geomon.capture.anatomy.families import (
    LeftOut,
    are_first_parts,
    attends,
    choose_blocks,
    find_families,
    group_by_pattern,
    pattern_of,
    shown_name,
)


def names_of(model):
    return {module: name for name, module in model.named_modules()}


def layer(width=32):
    return nn.TransformerEncoderLayer(width, 4, 4 * width)


def test_names_are_shown_without_wrappers():
    assert shown_name("module._forward_module.a.module_list.0") == "a.module_list.0"
    assert shown_name("_orig_mod.h.3._fsdp_wrapped_module") == "h.3"
    assert shown_name("module") == ""


def test_numbers_are_what_the_names_of_a_family_differ_by():
    assert pattern_of("encoder.10.sub_3.x") == pattern_of("encoder.2.sub_11.x")
    assert pattern_of("encoder.0") != pattern_of("decoder.0")


def test_modules_go_together_by_their_pattern():
    model = nn.ModuleDict({"a": nn.ModuleList([layer(), layer()]), "b": nn.ModuleList([layer()])})
    modules = [*model["a"], *model["b"]]
    assert group_by_pattern(modules, names_of(model)) == [[*model["a"]], [*model["b"]]]


def test_the_outermost_family_that_attends_is_found():
    model = PlainDecoder()
    found, left_out = find_families(model, names_of(model))
    assert found == [[*model.blocks]]
    assert left_out == []


def test_what_is_small_beside_the_stack_is_left_out_with_a_reason():
    model = nn.ModuleDict(
        {"main": nn.ModuleList(layer(64) for _ in range(4)), "aid": nn.ModuleList([layer(8)] * 1)}
    )
    model["aid"].append(layer(8))
    found, left_out = find_families(model, names_of(model))
    assert found == [[*model["main"]]]
    assert left_out == [LeftOut("aid.#", 2, "few parameters beside the largest stack")]


def test_nothing_is_found_where_nothing_is_numbered():
    model = nn.ModuleDict({"in": nn.Linear(3, 3), "out": nn.Linear(3, 3)})
    assert find_families(model, names_of(model)) == ([], [])


def test_blocks_are_chosen_by_name_or_given():
    model = PlainDecoder()
    names = names_of(model)
    assert choose_blocks(model, r"blocks\.[01]", names) == [*model.blocks][:2]
    assert choose_blocks(model, [model.blocks[2]], names) == [model.blocks[2]]
    with pytest.raises(ValueError, match="no module's name matches"):
        choose_blocks(model, "blocks", {m: n for m, n in names.items() if n != "blocks"})
    with pytest.raises(ValueError, match="not part of PlainDecoder"):
        choose_blocks(model, [layer()], names)


def test_attention_is_known_by_its_projections_or_its_name():
    assert attends(layer())
    named = nn.ModuleDict({"attention": nn.Sequential(nn.Linear(4, 4))})
    assert attends(named)
    assert not attends(nn.Sequential(nn.Linear(4, 4)))


def test_the_first_of_each_list_of_sublayers_stands_for_its_block():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

    model = nn.ModuleList(
        nn.ModuleList([Attention(), nn.Sequential(nn.Linear(8, 8))]) for _ in range(3)
    )
    first = [pair[0] for pair in model]
    names = names_of(model)
    assert are_first_parts(model, first, names)
    assert not are_first_parts(model, [pair[1] for pair in model], names)
    assert find_families(model, names)[0] == [first]


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
        (True, 2000, 500, True),
        (False, 2000, 500, True),  # a quarter
        (False, 2000, 499, False),
        (False, 2000, 900, True),
    ],
)
def test_a_family_is_watched_from_a_twentieth_or_a_quarter_of_the_largest(
    attention, large, small, watched
):
    model = nn.ModuleDict(
        {"main": weights(3, large, attention), "other": weights(3, small, attention)}
    )
    found, left_out = find_families(model, names_of(model))
    assert [len(family) for family in found] == ([3, 3] if watched else [3])
    assert [other.pattern for other in left_out] == ([] if watched else ["other.#"])
