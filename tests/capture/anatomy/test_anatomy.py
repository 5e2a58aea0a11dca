"""Find the stacks of blocks of a model before it runs, their attentions, tables and output."""

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from geomon import describe
from geomon.capture import find_anatomy
from geomon.capture.anatomy.projections import (
    are_heads,
    find_projections,
    find_widths,
    projects_in_its_own_way,
)
from support.models import PlainDecoder, Running, batch
from support.watched import look

# -- parts of models -------------------------------------------------------------------------------


class AttentionBlock(nn.Module):
    """A block with query and key projections under their usual names."""

    def __init__(self, width: int = 8, head_width: int | None = None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, head_width or width)
        self.k_proj = nn.Linear(width, head_width or width)
        self.mlp = nn.Linear(width, 4 * width)


class MlpBlock(nn.Module):
    """A block without attention."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mlp = nn.Linear(width, 6 * width)


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)


class Residual(nn.Module):
    """Makes the sum of a sublayer's output and the residual stream."""

    def forward(self, x, residual, scale=1.0):
        return residual + scale * x


Make = Callable[[], nn.Module]


def holder(**children: nn.Module) -> nn.Module:
    """A module that holds others under these names."""
    return with_children(nn.Module(), **children)


def with_children(module: nn.Module, /, **children: Any) -> nn.Module:
    for name, child in children.items():
        setattr(module, name, child)
    return module


def module_list(*makers: Make) -> nn.ModuleList:
    return nn.ModuleList(make() for make in makers)


def sequential(*makers: Make) -> nn.Sequential:
    return nn.Sequential(*(make() for make in makers))


def two_blocks(**makers: Make) -> nn.Module:
    """A model of the blocks layers.0 and layers.1, which hold such modules."""

    def block() -> nn.Module:
        return holder(**{name: make() for name, make in makers.items()})

    return holder(layers=module_list(block, block))


def blocks_of_size(count: int, parameters: int, *, attention: bool) -> nn.ModuleList:
    """Blocks with so many parameters each, under a name of attention or under another."""

    def block() -> nn.Module:
        inner = nn.Sequential(nn.Linear(parameters, 1, bias=False))
        return nn.Sequential(nn.ModuleDict({"attention" if attention else "mixing": inner}))

    return module_list(*[block] * count)


def attention_of_size(count: int, parameters: int) -> nn.ModuleList:
    return blocks_of_size(count, parameters, attention=True)


def mlps_of_size(count: int, parameters: int) -> nn.ModuleList:
    return blocks_of_size(count, parameters, attention=False)


def stage(width: int, count: int) -> nn.Module:
    """A stage of a hierarchical network: blocks, and what reduces the resolution behind them."""
    blocks = nn.ModuleList(AttentionBlock(width) for _ in range(count))
    return holder(blocks=blocks, down=NormBlock())


def convolutions(width: int, count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width)) for _ in range(count)))


def stages(*members: nn.Module) -> nn.Module:
    return holder(stages=nn.ModuleList(members))


def sublayer(*children: nn.Module) -> nn.ModuleList:
    return nn.ModuleList([nn.LayerNorm(8), *children])


def encoder_decoder() -> nn.Module:
    """A transformer of torch's own, with one block in the encoder and two in the decoder."""
    return nn.Transformer(16, 2, 1, 2, 32, batch_first=True)


# -- what is found ---------------------------------------------------------------------------------


def names_of_blocks(model: nn.Module, blocks: Any = None) -> dict[str, list[str]]:
    """The names of the blocks that are found in each stack, by the name of the stack."""
    found = find_anatomy(model, blocks).stacks
    return {stack.name: [block.name for block in stack.blocks] for stack in found}


def left_out_of(model: nn.Module) -> list[tuple[str, int, str, bool]]:
    """The families that are not watched: pattern, number, reason, and whether they are large."""
    return [dataclasses.astuple(family) for family in find_anatomy(model).left_out]


def check_stacks(model: nn.Module, blocks: dict[str, list[str]], *, left_out: Any = ()) -> None:
    """Check the names of the blocks of each stack, and that no other families are left out."""
    assert names_of_blocks(model) == blocks
    assert left_out_of(model) == [*left_out]


def check_refused(model: Any, blocks: Any, error: type[Exception], words: str) -> None:
    """Check that a model is refused in one line with these words."""
    with pytest.raises(error, match=words) as raised:
        find_anatomy(model, blocks)
    assert "\n" not in str(raised.value)


TWO_LAYERS = {"": ["layers.0", "layers.1"]}
FEW_PARAMETERS = "few parameters compared with the largest stack"
NO_ATTENTION = "no attention was found in them by name, but others have some"


# -- which families are stacks ---------------------------------------------------------------------


def test_stacks_within_modules_are_named_by_what_tells_them_apart():
    model = holder(inner=holder(model=encoder_decoder()))
    check_stacks(
        model,
        {
            "encoder": ["inner.model.encoder.layers.0"],
            "decoder": ["inner.model.decoder.layers.0", "inner.model.decoder.layers.1"],
        },
    )


def test_names_of_stacks_are_as_long_as_needed():
    def inner() -> nn.Module:
        return two_blocks(attention=AttentionBlock)

    model = holder(a=holder(x=inner(), y=inner()), b=inner())
    check_stacks(
        model,
        {
            "a.x": ["a.x.layers.0", "a.x.layers.1"],
            "a.y": ["a.y.layers.0", "a.y.layers.1"],
            "b.layers": ["b.layers.0", "b.layers.1"],
        },
    )


def test_a_stack_whose_blocks_are_children_of_the_model_is_the_main_one():
    model = sequential(AttentionBlock, AttentionBlock)
    model.side = module_list(AttentionBlock, AttentionBlock)
    check_stacks(model, {"main": ["0", "1"], "side": ["side.0", "side.1"]})


def test_lists_of_experts_inside_blocks_are_no_stacks():
    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    model = two_blocks(experts=lambda: module_list(*[expert] * 9))
    check_stacks(model, TWO_LAYERS)


def test_lists_of_sublayers_inside_blocks_are_no_stacks():
    def sublayers() -> nn.Module:
        return nn.ModuleList([holder(att=AttentionBlock()), holder(ff=MlpBlock())])

    check_stacks(two_blocks(layer=sublayers), TWO_LAYERS)


def test_numbered_attentions_of_a_block_are_no_stack():
    model = two_blocks(attn1=AttentionBlock, attn2=AttentionBlock)
    check_stacks(model, TWO_LAYERS)


def test_a_single_module_with_a_number_in_its_name_is_no_stack():
    model = two_blocks(mlp=MlpBlock, attn_drop=nn.Dropout)
    model.head2 = MlpBlock()
    check_stacks(model, TWO_LAYERS)


def test_a_list_of_one_block_is_a_stack():
    check_stacks(holder(layers=module_list(AttentionBlock)), {"": ["layers.0"]})


def test_a_small_model_beside_a_large_one_is_left_out():
    model = holder(small=PlainDecoder(8, layers=2), large=PlainDecoder(64, layers=2))
    check_stacks(
        model,
        {"": ["large.blocks.0", "large.blocks.1"]},
        left_out=[("small.blocks.#", 2, FEW_PARAMETERS, False)],
    )


def test_stacks_with_attention_are_watched_from_a_twentieth_of_the_largest_on():
    enough = holder(main=attention_of_size(2, 2000), other=attention_of_size(2, 100))
    both = {"main": ["main.0", "main.1"], "other": ["other.0", "other.1"]}
    check_stacks(enough, both)
    less = holder(main=attention_of_size(2, 2000), other=attention_of_size(2, 99))
    check_stacks(less, {"": ["main.0", "main.1"]}, left_out=[("other.#", 2, FEW_PARAMETERS, False)])


def test_without_any_attention_stacks_are_watched_from_a_quarter_of_the_largest_on():
    enough = holder(main=mlps_of_size(2, 400), other=mlps_of_size(2, 100))
    both = {"main": ["main.0", "main.1"], "other": ["other.0", "other.1"]}
    check_stacks(enough, both)
    less = holder(main=mlps_of_size(2, 400), other=mlps_of_size(2, 99))
    check_stacks(less, {"": ["main.0", "main.1"]}, left_out=[("other.#", 2, FEW_PARAMETERS, False)])


@pytest.mark.parametrize(("parameters", "is_large"), [(1000, True), (999, False)])
def test_stacks_without_attention_beside_one_with_it_are_left_out(parameters, is_large):
    """They are large from half of the largest watched stack on."""
    model = holder(main=attention_of_size(3, 2000), more2=mlps_of_size(3, parameters))
    check_stacks(
        model,
        {"": ["main.0", "main.1", "main.2"]},
        left_out=[("more2.#", 3, NO_ATTENTION, is_large)],
    )


def test_single_modules_and_modules_without_parameters_are_not_even_left_out():
    model = holder(
        main=attention_of_size(3, 2000),
        one=mlps_of_size(1, 9000),
        empty=module_list(*[lambda: nn.Sequential(nn.ReLU())] * 2),
    )
    check_stacks(model, {"": ["main.0", "main.1", "main.2"]})


def test_a_feature_extractor_without_attention_is_left_out():
    model = holder(
        features=holder(convs=module_list(MlpBlock, MlpBlock, MlpBlock)),
        encoder=holder(layers=module_list(AttentionBlock, AttentionBlock)),
    )
    check_stacks(
        model,
        {"": ["encoder.layers.0", "encoder.layers.1"]},
        left_out=[("features.convs.#", 3, NO_ATTENTION, True)],
    )


def test_a_frozen_copy_of_a_trained_stack_is_left_out():
    model = holder(net=PlainDecoder(), average=PlainDecoder().requires_grad_(False))
    check_stacks(
        model,
        {"": ["net.blocks.0", "net.blocks.1", "net.blocks.2"]},
        left_out=[("average.blocks.#", 3, "a frozen copy of a watched stack", False)],
    )


def test_a_twin_that_is_trained_too_is_watched():
    model = holder(net=PlainDecoder(layers=2), twin=PlainDecoder(layers=2))
    check_stacks(
        model,
        {
            "net": ["net.blocks.0", "net.blocks.1"],
            "twin": ["twin.blocks.0", "twin.blocks.1"],
        },
    )


def test_a_model_that_is_frozen_as_a_whole_is_watched():
    frozen = PlainDecoder().requires_grad_(False)
    check_stacks(frozen, {"": ["blocks.0", "blocks.1", "blocks.2"]})


def test_blocks_whose_weights_are_on_other_ranks_have_the_size_that_their_modules_say():
    """FSDP1 marks each module, and leaves a rank without a shard an empty parameter."""
    large = nn.ModuleList([AttentionBlock(64), AttentionBlock(64)])
    for module in large.modules():
        module._is_fsdp_managed_module = True
    for parameter in large.parameters():
        parameter.data = parameter.data.flatten()[:0]
    model = holder(layers=large, other=module_list(AttentionBlock, AttentionBlock))
    check_stacks(model, TWO_LAYERS, left_out=[("other.#", 2, FEW_PARAMETERS, False)])


# -- blocks in a Sequential ------------------------------------------------------------------------


def test_all_modules_of_a_sequential_that_alternates_are_blocks():
    model = sequential(*[MlpBlock, NormBlock] * 3)
    check_stacks(model, {"": ["0", "1", "2", "3", "4", "5"]})


def test_an_embedding_and_a_head_at_the_ends_of_a_sequential_are_no_blocks():
    model = sequential(
        lambda: nn.Embedding(9, 8), NormBlock,
        *[AttentionBlock] * 4,
        lambda: nn.LayerNorm(8), MlpBlock,
    )  # fmt: skip
    check_stacks(model, {"": ["2", "3", "4", "5"]})


def test_blocks_of_a_hybrid_may_be_of_two_classes():
    model = holder(
        layers=nn.ModuleList(
            [holder(parts=module_list(MlpBlock)), holder(parts=module_list(AttentionBlock))]
        )
    )
    check_stacks(model, TWO_LAYERS)


def test_the_first_block_of_a_list_may_be_of_another_class_without_attention():
    model = holder(layers=module_list(MlpBlock, AttentionBlock, AttentionBlock))
    check_stacks(model, {"": ["layers.0", "layers.1", "layers.2"]})


# -- stages: modules that merely hold blocks -------------------------------------------------------


def test_blocks_of_stages_of_several_widths_are_one_stack():
    model = holder(layers=nn.ModuleList([stage(8, count=1), stage(16, count=2)]))
    blocks = ["layers.0.blocks.0", "layers.1.blocks.0", "layers.1.blocks.1"]
    check_stacks(model, {"": blocks})


def test_blocks_of_stages_that_are_alike_are_one_stack():
    model = stages(stage(8, count=2), stage(8, count=2))
    blocks = [f"stages.{number}.blocks.{index}" for number in (0, 1) for index in (0, 1)]
    check_stacks(model, {"": blocks})


def test_blocks_of_stages_under_names_of_their_own_are_one_stack():
    model = holder(layer1=convolutions(8), layer2=convolutions(16, 3), fc=nn.Linear(16, 2))
    blocks = ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"]
    check_stacks(model, {"": blocks})


def test_blocks_of_sequentials_that_are_alike_are_one_stack():
    model = holder(
        layer1=sequential(AttentionBlock, AttentionBlock),
        layer2=sequential(AttentionBlock, AttentionBlock),
    )
    check_stacks(model, {"": ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]})


def test_blocks_in_lists_of_lists_are_one_stack():
    def pair() -> nn.Module:
        return module_list(AttentionBlock, AttentionBlock)

    model = holder(layers=module_list(pair, pair))
    check_stacks(model, {"": ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]})


def test_towers_side_by_side_are_stacks_of_their_own():
    model = holder(encoder1=stage(8, count=2), encoder2=stage(8, count=2))
    check_stacks(
        model,
        {
            "encoder1": ["encoder1.blocks.0", "encoder1.blocks.1"],
            "encoder2": ["encoder2.blocks.0", "encoder2.blocks.1"],
        },
    )


def test_modules_with_one_block_each_are_no_towers():
    model = holder(encoder1=stage(8, count=1), encoder2=stage(8, count=1))
    check_stacks(model, {"": ["encoder1.blocks.0", "encoder2.blocks.0"]})


def test_the_first_stages_may_be_convolutions_and_the_last_ones_attention():
    def of_pairs(block: Make) -> Make:
        return lambda: nn.Sequential(sequential(block, block))

    model = holder(stages=sequential(*map(of_pairs, (MlpBlock, MlpBlock, AttentionBlock))))
    blocks = [f"stages.{number}.0.{index}" for number in (0, 1, 2) for index in (0, 1)]
    check_stacks(model, {"": blocks})


def test_members_that_mix_attention_with_other_blocks_are_blocks_themselves():
    def attending() -> nn.Module:
        return holder(attn=AttentionBlock())

    model = stages(
        holder(blocks=sequential(MlpBlock, MlpBlock)),
        holder(blocks=sequential(MlpBlock, attending, attending)),
    )
    check_stacks(model, {"": ["stages.0", "stages.1"]})


def two_blocks_of_parts(first: list[nn.Module], second: list[nn.Module], rest: int = 1):
    """Two blocks that hold parts in a Sequential and, outside of it, a matrix of this width."""
    members = [
        holder(parts=nn.Sequential(*parts), rest=nn.Linear(rest, rest)) for parts in (first, second)
    ]
    return holder(layers=nn.ModuleList(members))


def test_parts_of_blocks_are_no_blocks():
    def parts() -> list[nn.Module]:
        return [MlpBlock(), MlpBlock(), AttentionBlock()]

    check_stacks(two_blocks_of_parts(parts(), parts()), TWO_LAYERS)


def test_one_part_of_each_class_is_no_block():
    model = two_blocks_of_parts([MlpBlock(8), AttentionBlock()], [MlpBlock(16), AttentionBlock()])
    check_stacks(model, TWO_LAYERS)


def test_parts_with_less_than_half_of_the_parameters_are_no_blocks():
    attending = [MlpBlock(), AttentionBlock(), AttentionBlock()]
    model = two_blocks_of_parts([MlpBlock(), MlpBlock()], attending, rest=100)
    check_stacks(model, TWO_LAYERS)


def test_attention_of_stages_outside_of_their_blocks_makes_the_stages_blocks():
    def member() -> nn.Module:
        return holder(parts=sequential(AttentionBlock, AttentionBlock), attn=AttentionBlock())

    check_stacks(holder(layers=module_list(member, member)), TWO_LAYERS)


@pytest.mark.parametrize(
    "members",
    [
        [convolutions(8) for _ in range(3)],
        [convolutions(width) for width in range(2, 8)],
        # Modules of any class, if they differ.
        [Running(len, held=convolutions(width)) for width in (8, 9)],
        # Stages with half of their parameters in blocks.
        [nn.Sequential(*convolutions(8), nn.Linear(8, 16)) for _ in range(2)],
    ],
    ids=["alike", "six", "of any class", "half"],
)
def test_stages_without_attention_hold_the_blocks(members):
    found = [block.module for block in find_anatomy(stages(*members)).blocks]
    assert len(found) == 2 * len(members)
    assert found[0] not in members


@pytest.mark.parametrize(
    "members",
    [
        [convolutions(width) for width in range(2, 9)],
        [convolutions(2, count=1), convolutions(4, count=1)],
        [Running(len, held=convolutions(8)) for _ in range(3)],
        [nn.Sequential(*convolutions(8), nn.Linear(8, 17)) for _ in range(2)],
    ],
    ids=["too many for stages", "one block in each", "blocks of two parts", "less than half"],
)
def test_members_without_attention_that_are_no_stages_are_blocks_themselves(members):
    assert [block.module for block in find_anatomy(stages(*members)).blocks] == members


# -- blocks that are lists of sublayers ------------------------------------------------------------


def attention_and_mlp() -> nn.ModuleList:
    return module_list(AttentionBlock, MlpBlock)


def test_the_first_sublayer_of_each_list_stands_for_the_block():
    model = holder(layers=module_list(attention_and_mlp, attention_and_mlp))
    check_stacks(model, {"": ["layers.0.0", "layers.1.0"]})


def test_layers_enter_blocks_that_are_the_first_of_several_sublayers():
    model = holder(layers=module_list(attention_and_mlp, attention_and_mlp))
    for first in (None, r"layers\.\d+\.0"):
        (stack,) = find_anatomy(model, first).stacks
        assert stack.entering
        assert stack.owner is model
    (second,) = find_anatomy(model, r"layers\.\d+\.1").stacks
    assert not second.entering
    assert second.owner is model


def test_layers_leave_blocks_of_other_kinds():
    def alike() -> nn.Module:
        return module_list(MlpBlock, MlpBlock)

    of_one_class = holder(layers=module_list(alike, alike))
    assert not find_anatomy(of_one_class, r"layers\.\d+\.0").stacks[0].entering
    assert not find_anatomy(PlainDecoder()).stacks[0].entering


def attending_lists_and(other: nn.Module) -> nn.Module:
    """A model of two attending lists that end in a residual, each followed by another sublayer."""
    attending = [sublayer(AttentionBlock(), Residual()) for _ in range(2)]
    return holder(layers=nn.ModuleList([attending[0], other, attending[1], other]))


def test_an_attending_list_begins_a_block_if_all_lists_end_in_a_residual():
    model = attending_lists_and(sublayer(MlpBlock(), Residual()))
    check_stacks(model, {"": ["layers.0", "layers.2"]})
    assert all(block.parts for block in find_anatomy(model).blocks)


def test_a_sublayer_before_the_first_attention_belongs_to_the_first_block():
    kinds = [MlpBlock, AttentionBlock, MlpBlock, AttentionBlock]
    layers = nn.ModuleList(sublayer(kind(), Residual()) for kind in kinds)
    first, second = find_anatomy(holder(layers=layers)).blocks
    assert (first.name, second.name) == ("layers.1", "layers.3")
    assert first.parts == tuple(part for each in layers[:3] for part in each)
    assert second.parts == tuple(layers[3])


def test_the_parts_of_a_block_are_what_is_called_of_lists_in_lists():
    inner = nn.ModuleList([nn.LayerNorm(8), nn.ModuleDict({"drop": nn.Dropout()})])
    norms = nn.ModuleList([nn.LayerNorm(8), inner])
    first = nn.ModuleList([norms, AttentionBlock(), Residual()])
    layers = [first, sublayer(MlpBlock(), Residual())]
    layers += [sublayer(AttentionBlock(), Residual()), sublayer(MlpBlock(), Residual())]
    block = find_anatomy(holder(layers=nn.ModuleList(layers))).blocks[0]
    assert block.parts == (norms[0], inner[0], inner[1]["drop"], *first[1:], *layers[1])
    assert block.matrices == tuple(
        module for each in layers[:2] for module in each.modules() if isinstance(module, nn.Linear)
    )


@pytest.mark.parametrize(
    "other",
    [
        sublayer(MlpBlock()),
        sublayer(MlpBlock(), nn.Identity()),
        sublayer(MlpBlock(), nn.ModuleList([Residual()])),
        nn.Sequential(nn.LayerNorm(8), MlpBlock(), Residual()),
    ],
    ids=["no residual", "a module of one input", "a list, not called", "no list"],
)
def test_lists_are_refused_if_some_sublayers_do_not_end_in_a_residual(other):
    check_refused(attending_lists_and(other), None, ValueError, "no transformer blocks")


# -- blocks that the user names --------------------------------------------------------------------


def test_blocks_may_be_named_by_a_pattern():
    model = holder(small=PlainDecoder(16, layers=2), large=PlainDecoder(64, layers=2))
    blocks = {"": ["small.blocks.0", "small.blocks.1"]}
    assert names_of_blocks(model, r"small\.blocks\.\d+") == blocks


def test_a_pattern_may_name_several_stacks():
    assert names_of_blocks(encoder_decoder(), r"(en|de)coder\.layers\.\d+") == {
        "encoder": ["encoder.layers.0"],
        "decoder": ["decoder.layers.0", "decoder.layers.1"],
    }


def test_blocks_may_be_given_as_modules():
    model = PlainDecoder()
    assert names_of_blocks(model, [*model.blocks[1:3]]) == {"": ["blocks.1", "blocks.2"]}


def test_modules_of_several_stacks_keep_the_order_in_which_they_are_given():
    model = encoder_decoder()
    found = names_of_blocks(model, [model.decoder.layers[1], model.encoder.layers[0]])
    assert [*found.items()] == [
        ("decoder", ["decoder.layers.1"]),
        ("encoder", ["encoder.layers.0"]),
    ]


def test_a_pattern_may_name_the_members_of_stages():
    first, second = sequential(MlpBlock, MlpBlock), sequential(MlpBlock, AttentionBlock)
    found = names_of_blocks(holder(stages=nn.Sequential(first, second)), r"stages\.\d+\.\d+")
    assert found == {"": ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]}


def test_stacks_that_no_part_of_their_path_tells_apart_are_numbered():
    model = two_blocks(one=AttentionBlock, two=MlpBlock)
    assert names_of_blocks(model, r"layers\.\d\.\w+") == {
        "stack_1": ["layers.0.one", "layers.1.one"],
        "stack_2": ["layers.0.two", "layers.1.two"],
    }


def test_what_was_found_cannot_be_changed():
    model = holder(main=attention_of_size(2, 2000), other=attention_of_size(2, 99))
    model.more = nn.ModuleList([AttentionBlock(400), AttentionBlock(400)])
    anatomy = find_anatomy(model)
    stack = anatomy.stacks[-1]
    attention = stack.blocks[0].attentions[0]
    parts = [anatomy, stack, stack.blocks[0], attention, attention.projections, *anatomy.left_out]
    assert len(parts) == 7
    for part in parts:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)


# -- models without blocks -------------------------------------------------------------------------


def test_a_model_without_blocks_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    said = "no transformer blocks in {} (its children: {}): expected modules with children"
    check_refused(model, None, ValueError, re.escape(said.format("Sequential", "0, 1")))
    check_refused(model[0], None, ValueError, re.escape(said.format("Linear", "none")))


@pytest.mark.parametrize(
    "make",
    [
        lambda: module_list(MlpBlock, NormBlock),
        lambda: module_list(MlpBlock, AttentionBlock),
        lambda: nn.ModuleList([module_list(AttentionBlock), MlpBlock(16)]),
    ],
    ids=["without attention", "attention second", "attention in a list"],
)
def test_lists_whose_first_member_is_no_attention_are_refused(make):
    pair = make()
    check_refused(stages(pair, pair), None, ValueError, "no transformer blocks")


def test_anything_but_a_module_is_refused():
    check_refused("gpt2", None, TypeError, r"expected a torch\.nn\.Module, got str")


def test_a_pattern_that_matches_no_whole_name_is_refused():
    check_refused(PlainDecoder(), "layers", ValueError, "no module's full name matches")


@pytest.mark.parametrize(
    ("blocks", "name", "members"),
    [
        (r"layers\.\d+", "layers.0", r"layers\.0\.\w+"),
        (lambda model: [model.layers[1].inner, model.layers[0]], "layers.1.inner",
         r"layers\.1\.inner\.\w+"),
    ],
)  # fmt: skip
def test_lists_are_refused_as_blocks_because_they_are_never_called(blocks, name, members):
    def pair() -> nn.Module:
        return with_children(module_list(AttentionBlock, MlpBlock), inner=nn.ModuleDict())

    model = holder(layers=module_list(pair, pair))
    chosen = blocks if isinstance(blocks, str) else blocks(model)
    kind = "ModuleDict" if "inner" in name else "ModuleList"
    with pytest.raises(ValueError, match="never called") as raised:
        find_anatomy(model, chosen)
    assert str(raised.value) == (
        f"{name} is a {kind}, which is never called: give its members, with "
        f'blocks=r"{members}", or as a list of modules'
    )


def test_a_stack_is_whole_if_no_blocks_are_in_other_parts():
    (stack,) = find_anatomy(PlainDecoder()).stacks
    assert stack.is_whole
    assert not dataclasses.replace(stack, before=1).is_whole
    assert not dataclasses.replace(stack, behind=1).is_whole
    assert not dataclasses.replace(stack, before=1, behind=1).is_whole


def test_modules_of_another_model_are_refused():
    check_refused(PlainDecoder(), [nn.Linear(2, 2)], ValueError, "not part of PlainDecoder")


# -- wrappers and plain lists ----------------------------------------------------------------------


def in_deepspeed(model: nn.Module) -> nn.Module:
    return holder(_forward_module=model)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, in_deepspeed])
@pytest.mark.parametrize("blocks", [None, r"blocks\.\d"])
def test_names_are_those_without_wrappers(wrap, blocks):
    plain = PlainDecoder()
    plain.final_norm = nn.LayerNorm(32)
    anatomy = find_anatomy(nn.DataParallel(wrap(plain)), blocks)
    assert [block.name for block in anatomy.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert ("final_norm", plain.final_norm) in anatomy.norms
    assert {type(norm) for _, norm in anatomy.norms} == {nn.LayerNorm}


def test_patterns_of_families_left_out_have_no_wrappers_either():
    model = holder(main=attention_of_size(2, 2000), other=attention_of_size(2, 99))
    assert left_out_of(nn.DataParallel(model)) == [("other.#", 2, FEW_PARAMETERS, False)]


def test_modules_in_lists_that_torch_does_not_know_may_be_blocks():
    """Keras keeps layers in plain lists, and a second time in a private one."""
    plain = PlainDecoder()
    model = Running(
        lambda m, ids: m.body[2](m.body[1](m.body[0](m.tokens(ids)))),
        tokens=plain.tokens,
        _everything=[plain.tokens, *plain.blocks],
        body=[*plain.blocks],
    )
    for blocks in (None, r"body\.\d", model.body):
        anatomy = find_anatomy(model, blocks)
        assert [block.name for block in anatomy.blocks] == ["body.0", "body.1", "body.2"]
        assert anatomy.stacks[0].owner is model
    for layer in look(model, batch(4, 6)).snapshot().layers:
        assert {"hidden", "token_ids"} <= layer.captured.keys()
        assert layer.index == 0 or "visible" in layer.captured


# -- the module that runs the blocks ---------------------------------------------------------------


def test_the_owner_is_the_innermost_module_that_runs_all_blocks_in_one_call():
    model = encoder_decoder()
    encoder, decoder = find_anatomy(model).stacks
    assert (encoder.owner, encoder.above) == (model.encoder, (model, model.encoder))
    assert (decoder.owner, decoder.above) == (model.decoder, (model.decoder,))


def test_a_module_in_a_list_is_no_owner_because_it_may_be_called_several_times():
    """ALBERT calls a group of shared layers once for each layer."""
    model = holder(groups=nn.ModuleList([holder(inner=module_list(*[AttentionBlock] * 2))]))
    assert find_anatomy(model).stacks[0].owner is model


@pytest.mark.parametrize(
    "make",
    [
        lambda: holder(body=sequential(AttentionBlock, AttentionBlock)),
        lambda: two_blocks(inner=AttentionBlock),
    ],
    ids=["Sequential", "ModuleList"],
)
def test_a_container_is_no_owner_because_it_may_be_iterated(make):
    model = make()
    assert find_anatomy(model).stacks[0].owner is model


# -- attentions of a block -------------------------------------------------------------------------


def narrow_attention() -> nn.Module:
    """An attention whose queries are half as wide as its input."""
    return AttentionBlock(8, head_width=4)


def two_lists(first: Make, second: Make) -> nn.Module:
    """A model of two blocks of different kinds."""
    return holder(layers=module_list(first, second))


def with_encoder(decoder: nn.Module) -> nn.Module:
    """A model with a stack before the decoder's own."""
    return holder(encoder=holder(layers=module_list(*[AttentionBlock] * 2)), decoder=decoder)


LABELS = {
    "two under names of their own": (
        lambda: two_blocks(attn1=AttentionBlock, attn2=AttentionBlock),
        ["", "attn2"],
    ),
    "two with one name, in modules": (
        lambda: two_blocks(
            a=lambda: holder(x=AttentionBlock()), b=lambda: holder(x=AttentionBlock())
        ),
        ["", "b.x"],
    ),
    "three in a list": (
        lambda: two_blocks(
            inner=lambda: module_list(*[AttentionBlock] * 3), mlp=lambda: MlpBlock(64)
        ),
        ["", "attention_2", "attention_3"],
    ),
    "one, which holds another": (
        lambda: two_blocks(attn=lambda: with_children(AttentionBlock(), inner=AttentionBlock())),
        [""],
    ),
    "two half as wide as their input, but in no list": (
        lambda: two_blocks(a=narrow_attention, b=narrow_attention),
        ["", "b"],
    ),
    "self-attention and attention to another stack": (encoder_decoder, ["", "cross"]),
    "attention to the encoder before self-attention": (
        lambda: with_encoder(two_blocks(encoder_attn=AttentionBlock, self_attn=AttentionBlock)),
        ["cross", ""],
    ),
    "three in a later stack, whose second sees the stack before": (
        lambda: with_encoder(
            two_blocks(own=AttentionBlock, source=AttentionBlock, more=AttentionBlock)
        ),
        ["", "cross", "more"],
    ),
    "three in the only stack": (
        lambda: two_blocks(own=AttentionBlock, source=AttentionBlock, more=AttentionBlock),
        ["", "source", "more"],
    ),
    "one, under a name of attention to another stack": (
        lambda: two_blocks(multihead_attn=lambda: nn.MultiheadAttention(8, 2)),
        [""],
    ),
    "one, under a name with cross in it": (
        lambda: two_lists(AttentionBlock, lambda: holder(cross_attn=AttentionBlock())),
        ["cross"],
    ),
}


@pytest.mark.parametrize("case", LABELS)
def test_attentions_of_a_block_have_labels_of_their_own(case):
    make, labels = LABELS[case]
    stack = find_anatomy(make()).stacks[-1]
    block = stack.blocks[-1]
    assert [attention.label for attention in block.attentions] == labels
    assert [attention.cross for attention in block.attentions] == [x == "cross" for x in labels]
    assert not any(attention.is_head for attention in block.attentions)
    assert stack.side_labels == [label for label in labels if label]
    assert block.attends == ("" in labels)
    for index, label in enumerate(labels):
        assert block.attention_index(label) == index


def test_heads_in_a_list_are_one_attention_of_the_block():
    model = two_blocks(heads=lambda: module_list(narrow_attention, narrow_attention))
    (stack,) = find_anatomy(model).stacks
    block = stack.blocks[-1]
    assert [attention.label for attention in block.attentions] == ["", ""]
    assert all(attention.is_head for attention in block.attentions)
    assert not any(attention.cross for attention in block.attentions)
    assert block.attends
    assert stack.side_labels == []
    assert block.attention_index() == 0


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([("k", 16), ("k", 16)], True),
        ([("k", 16), ("k", 16), ("k", 16)], False),
        ([("k", 16), ("k", 8)], False),
        ([("k", 16), ("kv", 16)], False),
        ([("k", 16), ("v", 16)], False),
        ([("k", 32)], False),
    ],
    ids=["two halves", "wider than their input", "of two widths", "keys with values",
         "one without keys", "one"],
)  # fmt: skip
def test_attentions_of_a_list_are_heads_if_together_they_are_as_wide_as_their_input(
    members, expected
):
    """Each member has queries, and something else under a name of its own, of a width."""

    def member(name: str, width: int) -> nn.Module:
        return holder(**{"q": nn.Linear(32, width), name: nn.Linear(32, width)})

    model = two_blocks(heads=lambda: nn.ModuleList(member(*each) for each in members), mlp=MlpBlock)
    found = find_anatomy(model).blocks[0].attentions
    assert any(attention.is_head for attention in found) == expected


def test_attentions_of_two_widths_are_no_heads_though_each_has_half_of_its_input():
    halves = [holder(q=nn.Linear(n, n // 2), k=nn.Linear(n, n // 2)) for n in (32, 16)]
    wide, narrow = map(find_projections, halves)
    assert are_heads([wide, wide])
    assert are_heads([narrow, narrow])
    assert not are_heads([wide, narrow])
    assert not are_heads([narrow, wide])


def test_blocks_attend_by_their_projections_or_by_names_of_attention():
    for model, attend in (
        (two_blocks(mlp=MlpBlock), False),
        (two_blocks(inner=AttentionBlock), True),
        (holder(layers=attention_of_size(2, 8)), True),
    ):
        assert [block.attends for block in find_anatomy(model).blocks] == [attend] * 2


# -- projections of an attention -------------------------------------------------------------------


def found_projections(**children: nn.Module) -> list[tuple[str, ...]]:
    """The names of the projections found in an attention with these children, if any.

    Also checks that these are the names of the modules, and that a description has them.
    """
    model = two_blocks(part=lambda: holder(**children), mlp=MlpBlock)
    found = [attention.projections for attention in find_anatomy(model).blocks[0].attentions]
    shown = dict(describe(model).rows).get("Q, K projected")
    assert (shown is None) == (found == [])
    for each in found:
        assert each.query is children[each.names[0]]
        assert each.key is children[each.names[-1]]
        paths = [f"part.{name}" for name in each.names]
        assert shown == (" and ".join(paths) if len(paths) == 2 else f"{paths[0]}, with V")
    return [each.names for each in found]


SEPARATE = [
    "q_proj k_proj", "query key", "q_lin k_lin", "query_proj key_proj", "q k", "wq wk", "to_q to_k",
    "Wq Wk", "linear_q linear_k", "project_q project_k", "projection_query projection_key",
]  # fmt: skip
KEYS_WITH_VALUES = [
    "q_attn c_attn", "q_proj kv_proj", "to_q to_kv", "q kv", "wq wkv", "q_b_proj kv_b_proj",
    "q_proj kv_b_proj", "wq_b wkv_b", "wq wkv_b",
]  # fmt: skip


@pytest.mark.parametrize("names", [*SEPARATE, *KEYS_WITH_VALUES])
def test_a_pair_of_projections_is_found_by_its_names_whatever_its_modules_are(names):
    query, key = names.split()
    children = {query: nn.Identity(), key: nn.Identity()}
    assert found_projections(**children) == [(query, key)]


@pytest.mark.parametrize("names", ["c_q c_k", "attn_query attn_key", "wQ wK", "q_w k_w"])
def test_a_pair_of_matrices_is_found_if_its_names_differ_only_in_query_and_key(names):
    query, key = names.split()
    children = {query: nn.Linear(8, 8), key: nn.Linear(8, 8)}
    assert found_projections(**children) == [(query, key)]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        *((names, "separate") for names in [*SEPARATE, "c_q c_k"]),
        *((names, "joint") for names in KEYS_WITH_VALUES),
        ("qkv", "fused"),
        ("", "multihead"),
    ],
)
def test_projections_say_whether_keys_come_alone_or_with_values(names, kind):
    made = holder(**{name: nn.Linear(8, 8) for name in names.split()})
    if kind == "multihead":
        made = nn.MultiheadAttention(8, 2)
    found = find_projections(made)
    assert found.kind == kind
    assert (found.key is found.query) == (kind in ("fused", "multihead"))
    if kind == "multihead":
        assert found.query is made
        assert found.names == ("in_proj_weight",)


def test_matrices_of_unequal_inputs_are_no_pair():
    """Queries and keys that come from two latents are not known by name."""
    assert found_projections(q_b=nn.Linear(4, 8), k_b=nn.Linear(2, 8)) == []


def test_letters_inside_a_word_do_not_make_a_pair():
    assert found_projections(freq=nn.Linear(8, 8), frek=nn.Linear(8, 8)) == []


def test_queries_without_keys_are_no_attention():
    assert found_projections(q_proj=nn.Linear(8, 8), v_proj=nn.Linear(8, 8)) == []


def test_norms_of_queries_and_keys_are_no_projections():
    norms = {"q_norm": nn.LayerNorm(8), "k_norm": nn.LayerNorm(8)}
    assert found_projections(**norms) == []
    assert found_projections(qkv=nn.Linear(8, 24), **norms) == [("qkv",)]


@pytest.mark.parametrize(
    "name",
    ["c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "to_qkv", "att_proj"],
)
def test_one_matrix_for_queries_keys_and_values_is_found_by_its_name(name):
    assert found_projections(**{name: nn.Linear(8, 24)}) == [(name,)]


def matrix(*shape: int, **attributes: int) -> nn.Module:
    """A module with a weight of this shape, which may say its widths."""
    return with_children(nn.Module(), weight=nn.Parameter(torch.zeros(shape)), **attributes)


def parametrized_matrix() -> nn.Module:
    return parametrize.register_parametrization(matrix(24, 8), "weight", nn.Identity())


@pytest.mark.parametrize(
    "make",
    [lambda: matrix(8, 24, nf=24), lambda: matrix(2, nf=24, nx=8), parametrized_matrix],
    ids=["Conv1D of older transformers", "flattened Conv1D", "parametrised"],
)
def test_any_module_with_a_matrix_may_make_queries_keys_and_values(make):
    assert found_projections(qkv=make()) == [("qkv",)]


@pytest.mark.parametrize(
    ("make", "widths"),
    [
        (lambda: nn.Linear(8, 24), (24, 8)),
        (lambda: nn.Embedding(50, 8), (50, 8)),
        (lambda: matrix(24, 8), (24, 8)),
        (lambda: matrix(8, 24, nf=24), (24, 8)),  # transposed
        (lambda: matrix(24, 8, nf=24), (24, 8)),
        (lambda: matrix(2, nf=24, nx=8), (24, 8)),
        (lambda: matrix(8, 24, 1), None),
    ],
)
def test_a_matrix_has_an_output_width_and_an_input_width(make, widths):
    assert find_widths(make()) == widths


def test_blocks_may_have_a_single_parameter():
    check_stacks(holder(layers=attention_of_size(2, 1)), TWO_LAYERS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: matrix(2, out_features=24),
        lambda: matrix(8, 24, 1),
        lambda: nn.Conv2d(8, 24, 1),
        nn.ReLU,
    ],
    ids=["one width alone", "three dimensions", "convolution", "no weight"],
)
def test_a_module_without_a_matrix_makes_no_queries_keys_and_values(make):
    assert found_projections(qkv=make()) == []


def marked_linear(**of_weight: Any) -> nn.Module:
    """A linear module whose weight has attributes, as those that a wrapper has sharded."""
    module = nn.Linear(8, 8)
    for name, value in of_weight.items():
        setattr(module.weight, name, value)
    return module


def hooked_linear() -> nn.Module:
    module = nn.Linear(8, 8)
    module.register_forward_hook(lambda module, args, output: output)
    return module


@pytest.mark.parametrize(
    ("make", "in_its_own_way"),
    [
        (lambda: nn.Linear(8, 8), False),
        (lambda: nn.Linear(8, 8, bias=False).bfloat16(), False),
        (lambda: type("Quantised", (nn.Linear,), {})(8, 8), True),
        (lambda: nn.Conv1d(8, 8, 1), True),
        (lambda: marked_linear(to_local=None), True),
        (lambda: marked_linear(_st_info=None), True),
        (hooked_linear, True),
    ],
)  # fmt: skip
def test_a_projection_of_its_own_way_is_more_than_a_product_and_a_bias(make, in_its_own_way):
    assert projects_in_its_own_way(make()) == in_its_own_way


# -- tables and outputs ----------------------------------------------------------------------------


def of_class(name: str, **attributes: Any) -> nn.Module:
    """A module of a class with this name."""
    return with_children(type(name, (nn.Module,), {})(), **attributes)


def parallel_embedding(**children: nn.Module) -> nn.Module:
    """A table of a class that torch does not have."""
    return of_class("ParallelEmbedding", weight=nn.Parameter(torch.randn(50, 64)), **children)


def test_tables_are_embeddings_and_matrices_of_a_class_that_is_named_so():
    model = PlainDecoder(width=64, layers=2, embedding=parallel_embedding())
    assert set(find_anatomy(model).embeddings) == {model.embedding, model.tokens, model.places}


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_class("RotaryEmbedding", frequencies=nn.Buffer(torch.randn(64))),
        lambda: parallel_embedding(inner=nn.Linear(64, 64)),
    ],
    ids=["no matrix", "a module around others"],
)
def test_other_modules_named_embedding_are_no_tables(make):
    model = PlainDecoder(width=64, layers=2, other=make())
    assert set(find_anatomy(model).embeddings) == {model.tokens, model.places}


def test_embeddings_inside_blocks_are_no_tables():
    model = PlainDecoder()
    model.blocks[0].inside = nn.Embedding(3, 3)
    assert set(find_anatomy(model).embeddings) == {model.tokens, model.places}


def model_with_outputs(**outputs: nn.Module) -> nn.Module:
    """A model with a table of 50 rows of width 8, two blocks, and these modules behind them."""
    return holder(
        table=nn.Embedding(50, 8), layers=module_list(AttentionBlock, AttentionBlock), **outputs
    )


def test_the_last_of_several_outputs_counts():
    model = model_with_outputs(head=nn.Linear(8, 50, bias=False), other=nn.Linear(8, 50))
    assert find_anatomy(model).output is model.other


def test_an_output_that_shares_its_weight_with_a_table_comes_first():
    model = model_with_outputs(head=nn.Linear(8, 50, bias=False), other=nn.Linear(8, 50))
    model.head.weight = model.table.weight
    assert find_anatomy(model).output is model.head


def test_a_low_rank_factor_behind_the_output_is_not_the_output():
    model = model_with_outputs(head=nn.Linear(8, 50), low=nn.Linear(2, 50))
    assert find_anatomy(model).output is model.head


def test_an_output_may_be_of_another_width_than_the_table_if_it_is_the_only_one():
    model = model_with_outputs(head=nn.Linear(6, 50))
    assert find_anatomy(model).output is model.head


def test_tables_and_outputs_in_lists_that_torch_does_not_know_are_found():
    table, head, model = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Module()
    model.body = [AttentionBlock(), AttentionBlock()]
    model.tables = {"tokens": holder(table=table)}
    model.heads = [with_children(nn.Module(), parts=(holder(head=head),))]
    anatomy = find_anatomy(model)
    assert anatomy.embeddings == (table,)
    assert anatomy.output is head
    assert anatomy.of_output == (table,)
    assert anatomy.adapted == ()


# -- outputs with an adapter around them -----------------------------------------------------------


def low_rank_adapter(base: nn.Linear, **widths: int) -> nn.Module:
    """A frozen matrix plus a trained product of low rank; says its widths."""
    first, second = nn.Linear(32, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
    said = {"in_features": 32, "out_features": base.out_features, **widths}
    return Running(
        lambda m, x: m.base(x) + m.second(m.first(x)),
        base=base.requires_grad_(False), first=first, second=second, **said,
    )  # fmt: skip


def trained_copy(original: nn.Linear) -> nn.Module:
    """A frozen matrix, and the copy of it that is trained in its place."""
    copied = copy.deepcopy(original).requires_grad_(True)
    original.requires_grad_(False)
    return Running(lambda m, x: m.trained(x), trained=copied, original=original)


def decoder(*, tied: bool) -> PlainDecoder:
    """A frozen decoder, which may share the weight of its table with its head."""
    model = PlainDecoder().requires_grad_(False)
    if tied:
        model.head.weight = model.tokens.weight
    return model


IS_TIED = pytest.mark.parametrize("tied", [True, False])


@IS_TIED
def test_an_output_without_an_adapter_is_not_adapted(tied):
    model = decoder(tied=tied).requires_grad_(True)
    anatomy = find_anatomy(model)
    assert anatomy.output is model.head
    assert anatomy.adapted == ()


@IS_TIED
def test_the_output_is_the_matrix_inside_an_adapter_and_is_adapted(tied):
    model = decoder(tied=tied)
    model.head = low_rank_adapter(model.head)
    anatomy = find_anatomy(model)
    assert anatomy.output is model.head.base
    assert anatomy.adapted == (model.head.base,)


@IS_TIED
def test_a_wrapper_without_parameters_of_its_own_adapts_nothing(tied):
    model = decoder(tied=tied)
    model.head = with_children(low_rank_adapter(model.head), first=None, second=None)
    anatomy = find_anatomy(model)
    assert anatomy.output is model.head.base
    assert anatomy.adapted == ()


@IS_TIED
def test_a_module_of_another_width_around_the_output_is_no_adapter(tied):
    model = decoder(tied=tied)
    model.head = low_rank_adapter(model.head, in_features=31)
    anatomy = find_anatomy(model)
    assert anatomy.output is model.head.base
    assert anatomy.adapted == ()


@IS_TIED
def test_the_output_is_the_trained_copy_of_a_frozen_original(tied):
    model = decoder(tied=tied)
    model.head = trained_copy(model.head)
    anatomy = find_anatomy(model)
    assert anatomy.output is model.head.trained
    assert anatomy.adapted == ()
