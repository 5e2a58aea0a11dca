"""What is found in a model before it runs: stacks of blocks, their attentions, tables and heads."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from geomon import describe
from geomon.capture import find_anatomy
from support.models import PlainDecoder, Running, batch
from support.watched import look


class Attending(nn.Module):
    def __init__(self, width: int = 8, made: int | None = None) -> None:
        super().__init__()
        made = made or width
        self.q_proj, self.k_proj = nn.Linear(width, made), nn.Linear(width, made)
        self.mlp = nn.Linear(width, 4 * width)


class Mixing(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 6 * width)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)


class Residual(nn.Module):
    def forward(self, x, residual, scale=1.0):
        return residual + scale * x


def module(**children) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def listed(*kinds) -> nn.ModuleList:
    return nn.ModuleList(kind() for kind in kinds)


def chain(*kinds) -> nn.Sequential:
    return nn.Sequential(*(kind() for kind in kinds))


def half() -> nn.Module:
    return Attending(8, 4)


def two(**kinds):
    """A model of two such blocks."""
    return module(layers=listed(*[lambda: module(**{n: k() for n, k in kinds.items()})] * 2))


def stage(width: int, count: int, kind=Attending) -> nn.Module:
    return module(blocks=nn.ModuleList(kind(width) for _ in range(count)), down=Norm())


def convolutions(width: int, count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width)) for _ in range(count)))


def stages(*members: nn.Module) -> nn.Module:
    return module(s=nn.ModuleList(members))


def sublayer(*children: nn.Module) -> nn.ModuleList:
    return nn.ModuleList([nn.LayerNorm(8), *children])


def weights(count: int, each: int, *, attention: bool) -> nn.ModuleList:
    """Blocks of `each` parameters, with a module called attention in them or without."""

    def member() -> nn.Module:
        inner = nn.Sequential(nn.Linear(each, 1, bias=False))
        return nn.Sequential(nn.ModuleDict({"attention" if attention else "mixing": inner}))

    return nn.ModuleList(member() for _ in range(count))


def attending(count: int, each: int) -> nn.ModuleList:
    return weights(count, each, attention=True)


def mixing(count: int, each: int) -> nn.ModuleList:
    return weights(count, each, attention=False)


def parts_of(first, second, beside: int = 1) -> nn.Module:
    members = (
        module(parts=nn.Sequential(*parts), rest=nn.Linear(beside, beside))
        for parts in (first, second)
    )
    return module(layers=nn.ModuleList(members))


def behind(first: nn.Module, /, **more) -> nn.Module:
    for name, child in more.items():
        setattr(first, name, child)
    return first


def held_elsewhere() -> nn.Module:
    """Larger blocks, of whose weights this rank has nothing: FSDP1 says so of each module."""
    large = listed(*[lambda: Attending(64)] * 2)
    for each in large.modules():
        each._is_fsdp_managed_module = True
    for parameter in large.parameters():
        parameter.data = parameter.data.flatten()[:0]
    return module(layers=large, other=listed(Attending, Attending))


def encoder_decoder() -> nn.Module:
    return nn.Transformer(16, 2, 1, 2, 32, batch_first=True)


TWO = "layers.0 layers.1"
FEW = "few parameters compared with the largest stack"
UNLIKE = "no attention was found in them by name, but others have some"
DECODER = "blocks.0 blocks.1 blocks.2"

# A model -> the blocks of each stack; what is left out: pattern, number, reason, whether large.
STACKS = {
    "experts in blocks": (
        lambda: two(experts=lambda: listed(*[lambda: chain(*[lambda: nn.Linear(64, 64)] * 2)] * 9)),
        {"": TWO},
    ),
    "held by other ranks": (held_elsewhere, {"": TWO}, ("other.#", 2, FEW, False)),
    "sublayers of a block": (
        lambda: two(layer=lambda: nn.ModuleList([module(att=Attending()), module(ff=Mixing())])),
        {"": TWO},
    ),
    "two attentions in a block": (lambda: two(attn1=Attending, attn2=Attending), {"": TWO}),
    "one numbered module beside": (
        lambda: module(layers=two(mix=Mixing, attn_drop=nn.Dropout).layers, head2=Mixing()),
        {"": TWO},
    ),
    "a small stack beside": (
        lambda: module(small=PlainDecoder(width=8, layers=2), large=PlainDecoder(64, layers=2)),
        {"": "large.blocks.0 large.blocks.1"},
        ("small.blocks.#", 2, FEW, False),
    ),
    "a twentieth, attending": (
        lambda: module(main=attending(2, 2000), other=attending(2, 100)),
        {"main": "main.0 main.1", "other": "other.0 other.1"},
    ),
    "less than a twentieth": (
        lambda: module(main=attending(2, 2000), other=attending(2, 99)),
        {"": "main.0 main.1"},
        ("other.#", 2, FEW, False),
    ),
    "a quarter, without attention": (
        lambda: module(main=mixing(2, 400), b=mixing(2, 100)),
        {"main": "main.0 main.1", "b": "b.0 b.1"},
    ),
    "less than a quarter": (
        lambda: module(main=mixing(2, 400), b=mixing(2, 99)),
        {"": "main.0 main.1"},
        ("b.#", 2, FEW, False),
    ),
    "half of the largest, without attention": (
        lambda: module(main=attending(3, 2000), more2=mixing(3, 1000),
                       one=mixing(1, 9000), no=listed(*[lambda: chain(nn.ReLU)] * 2)),
        {"": "main.0 main.1 main.2"},
        ("more2.#", 3, UNLIKE, True),
    ),
    "less than half": (
        lambda: module(main=attending(3, 2000), more2=mixing(3, 999)),
        {"": "main.0 main.1 main.2"},
        ("more2.#", 3, UNLIKE, False),
    ),
    "a frozen twin": (
        lambda: module(net=PlainDecoder(), average=PlainDecoder().requires_grad_(False)),
        {"": "net.blocks.0 net.blocks.1 net.blocks.2"},
        ("average.blocks.#", 3, "a frozen copy of a watched stack", False),
    ),
    "a twin that is trained": (
        lambda: module(net=PlainDecoder(layers=2), twin=PlainDecoder(layers=2)),
        {"net": "net.blocks.0 net.blocks.1", "twin": "twin.blocks.0 twin.blocks.1"},
    ),
    "all frozen": (lambda: PlainDecoder().requires_grad_(False), {"": DECODER}),
    "stacks within modules": (
        lambda: module(inner=module(model=encoder_decoder())),
        {"encoder": "inner.model.encoder.layers.0",
         "decoder": "inner.model.decoder.layers.0 inner.model.decoder.layers.1"},
    ),
    "names that differ in the middle": (
        lambda: module(a=module(x=two(y=Attending), y=two(y=Attending)), b=two(y=Attending)),
        {"a.x": "a.x.layers.0 a.x.layers.1", "a.y": "a.y.layers.0 a.y.layers.1",
         "b.layers": "b.layers.0 b.layers.1"},
    ),
    "a root that is a list": (
        lambda: behind(chain(Attending, Attending), side=listed(Attending, Attending)),
        {"main": "0 1", "side": "side.0 side.1"},
    ),
    "a sequential that alternates": (lambda: chain(*[Mixing, Norm] * 3), {"": "0 1 2 3 4 5"}),
    "a sequential with other ends": (
        lambda: chain(lambda: nn.Embedding(9, 8), Norm, *[Attending] * 4, lambda: nn.LayerNorm(8),
                      Mixing),
        {"": "2 3 4 5"},
    ),
    "stages of two widths": (
        lambda: module(layers=nn.ModuleList([stage(8, 1), stage(16, 2)])),
        {"": "layers.0.blocks.0 layers.1.blocks.0 layers.1.blocks.1"},
    ),
    "stages under names of their own": (
        lambda: module(layer1=convolutions(8), layer2=convolutions(16, 3), fc=nn.Linear(16, 2)),
        {"": "layer1.0 layer1.1 layer2.0 layer2.1 layer2.2"},
    ),
    "stages that are alike": (
        lambda: module(stages=nn.ModuleList([stage(8, 2), stage(8, 2)])),
        {"": "stages.0.blocks.0 stages.0.blocks.1 stages.1.blocks.0 stages.1.blocks.1"},
    ),
    "towers side by side": (
        lambda: module(encoder1=stage(8, 2), encoder2=stage(8, 2)),
        {"encoder1": "encoder1.blocks.0 encoder1.blocks.1",
         "encoder2": "encoder2.blocks.0 encoder2.blocks.1"},
    ),
    "one block in each tower": (
        lambda: module(encoder1=stage(8, 1), encoder2=stage(8, 1)),
        {"": "encoder1.blocks.0 encoder2.blocks.0"},
    ),
    "sequentials under names of their own": (
        lambda: module(layer1=chain(Attending, Attending), layer2=chain(Attending, Attending)),
        {"": "layer1.0 layer1.1 layer2.0 layer2.1"},
    ),
    "stages of convolutions and of attention": (
        lambda: module(stages=chain(*[lambda k=k: chain(lambda: chain(k, k)) for k in
                                      (Mixing, Mixing, Attending)])),
        {"": "stages.0.0.0 stages.0.0.1 stages.1.0.0 stages.1.0.1 stages.2.0.0 stages.2.0.1"},
    ),
    "a hybrid": (
        lambda: module(layers=listed(lambda: module(parts=listed(Mixing)),
                                     lambda: module(parts=listed(Attending)))),
        {"": TWO},
    ),
    "stages of mixed members": (
        lambda: stages(*(module(blocks=chain(*kinds)) for kinds in
                         ((Mixing, Mixing), (Mixing, *[lambda: module(attn=Attending())] * 2)))),
        {"": "s.0 s.1"},
    ),
    "parts of blocks, alike": (
        lambda: parts_of([Mixing(), Mixing(), Attending()], [Mixing(), Mixing(), Attending()]),
        {"": TWO},
    ),
    "parts of blocks, one of each class": (
        lambda: parts_of([Mixing(8), Attending()], [Mixing(16), Attending()]), {"": TWO}
    ),
    "parts of blocks, most of which is elsewhere": (
        lambda: parts_of([Mixing(), Mixing()], [Mixing(), Attending(), Attending()], 100),
        {"": TWO},
    ),
    "without attention beside a stack with it": (
        lambda: module(features=module(convs=listed(Mixing, Mixing, Mixing)),
                       encoder=module(layers=listed(Attending, Attending))),
        {"": "encoder.layers.0 encoder.layers.1"},
        ("features.convs.#", 3, UNLIKE, True),
    ),
    "blocks that are alike, in lists of lists": (
        lambda: module(layers=nn.ModuleList(listed(Attending, Attending) for _ in range(2))),
        {"": "layers.0.0 layers.0.1 layers.1.0 layers.1.1"},
    ),
    "lists of sublayers": (
        lambda: module(layers=nn.ModuleList(listed(Attending, Mixing) for _ in range(2))),
        {"": "layers.0.0 layers.1.0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STACKS)
def test_the_blocks_of_each_stack_are_found(case):
    make, expected, *left_out = STACKS[case]
    anatomy = find_anatomy(make())
    found = {stack.name: " ".join(block.name for block in stack.blocks) for stack in anatomy.stacks}
    assert found == expected
    assert [dataclasses.astuple(each) for each in anatomy.left_out] == left_out


@pytest.mark.parametrize(
    ("members", "blocks"),
    [
        ([convolutions(8) for _ in range(3)], 6),
        ([convolutions(width) for width in range(2, 8)], 12),
        ([convolutions(width) for width in range(2, 9)], 0),  # too many for stages
        ([convolutions(2, 1), convolutions(4, 1)], 0),
        ([Running(len, held=convolutions(width)) for width in (8, 9)], 4),
        ([Running(len, held=convolutions(8)) for _ in range(3)], 0),  # alike: blocks of two parts
        ([nn.Sequential(*convolutions(8), nn.Linear(8, 16)) for _ in range(2)], 4),  # half of each
        ([nn.Sequential(*convolutions(8), nn.Linear(8, 17)) for _ in range(2)], 0),
    ],
)
def test_stages_without_attention_hold_the_blocks_or_are_blocks_themselves(members, blocks):
    found = [block.module for block in find_anatomy(stages(*members)).blocks]
    assert found == members if not blocks else (len(found) == blocks and found[0] not in members)


# Blocks that are named: a pattern or a function of the model -> the blocks of each stack.
NAMED = {
    "a pattern": (
        lambda: module(small=PlainDecoder(16, layers=2), large=PlainDecoder(64, layers=2)),
        r"small\.blocks\.\d+", {"": "small.blocks.0 small.blocks.1"},
    ),
    "modules": (PlainDecoder, lambda model: [*model.blocks[1:3]], {"": "blocks.1 blocks.2"}),
    "of several stacks": (
        encoder_decoder, r"(en|de)coder\.layers\.\d+",
        {"encoder": "encoder.layers.0", "decoder": "decoder.layers.0 decoder.layers.1"},
    ),
    "modules of several stacks": (
        encoder_decoder, lambda model: [model.decoder.layers[1], model.encoder.layers[0]],
        {"decoder": "decoder.layers.1", "encoder": "encoder.layers.0"},
    ),
    "members of stages": (
        lambda: module(stages=nn.Sequential(chain(Mixing, Mixing), chain(Mixing, Attending))),
        r"stages\.\d+\.\d+", {"": "stages.0.0 stages.0.1 stages.1.0 stages.1.1"},
    ),
    "two of each": (
        lambda: two(one=Attending, two=Mixing), r"layers\.\d\.\w+",
        {"stack_1": "layers.0.one layers.1.one", "stack_2": "layers.0.two layers.1.two"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_blocks_may_be_named(case):
    make, blocks, expected = NAMED[case]
    model = make()
    anatomy = find_anatomy(model, blocks(model) if callable(blocks) else blocks)
    found = {stack.name: " ".join(block.name for block in stack.blocks) for stack in anatomy.stacks}
    assert found == expected


PAIRS = [listed(Mixing, Norm), listed(Mixing, Attending),
         nn.ModuleList([listed(Attending), Mixing(16)])]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "blocks", "error", "words"),
    [
        (chain(*[lambda: nn.Linear(4, 4)] * 2), None, ValueError, "no transformer blocks in Seq"),
        *((stages(pair, pair), None, ValueError, "no transformer blocks") for pair in PAIRS),
        ("gpt2", None, TypeError, r"expected a torch\.nn\.Module, got str"),
        (PlainDecoder(), "layers", ValueError, "no module's full name matches"),
        (PlainDecoder(), [nn.Linear(2, 2)], ValueError, "not part of PlainDecoder"),
    ],
)
def test_what_has_no_blocks_is_refused_in_one_line(model, blocks, error, words):
    with pytest.raises(error, match=words) as raised:
        find_anatomy(model, blocks)
    assert "\n" not in str(raised.value)


def test_wrappers_do_not_show_in_names():
    plain = PlainDecoder()
    plain.final_norm = nn.LayerNorm(32)
    for around in (torch.compile, nn.DataParallel, lambda x: module(_forward_module=x)):
        model = nn.DataParallel(around(plain))
        for blocks in (None, r"blocks\.\d"):
            anatomy = find_anatomy(model, blocks)
            assert [block.name for block in anatomy.blocks] == DECODER.split()
            assert ("final_norm", plain.final_norm) in anatomy.norms
            assert {type(norm) for _, norm in anatomy.norms} == {nn.LayerNorm}
    few = nn.DataParallel(module(main=attending(2, 2000), other=attending(2, 99)))
    assert [each.pattern for each in find_anatomy(few).left_out] == ["other.#"]


# -- who calls the blocks ------------------------------------------------------------------------


def test_the_owner_is_the_innermost_module_of_which_one_call_runs_all_blocks():
    model = encoder_decoder()
    encoder, decoder = find_anatomy(model).stacks
    assert (encoder.owner, encoder.above) == (model.encoder, (model, model.encoder))
    assert (decoder.owner, decoder.above) == (model.decoder, (model.decoder,))
    shared = module(groups=nn.ModuleList([module(inner=listed(Attending, Attending))]))
    assert find_anatomy(shared).stacks[0].owner is shared  # the group may be called several times
    for iterated in (module(body=chain(Attending, Attending)), two(inner=Attending)):
        assert find_anatomy(iterated).stacks[0].owner is iterated


def test_of_lists_of_sublayers_the_first_stands_for_the_block():
    pairs = module(layers=nn.ModuleList(listed(Attending, Mixing) for _ in range(2)))
    for blocks, entering in ((None, True), (r"layers\.\d+\.0", True), (r"layers\.\d+\.1", False)):
        (stack,) = find_anatomy(pairs, blocks).stacks
        assert (stack.entering, stack.owner) == (entering, pairs)
    alike = module(layers=nn.ModuleList(listed(Mixing, Mixing) for _ in range(2)))
    assert not find_anatomy(alike, r"layers\.\d+\.0").stacks[0].entering
    assert not find_anatomy(PlainDecoder()).stacks[0].entering


@pytest.mark.parametrize(
    ("other", "leads"),
    [
        (sublayer(Mixing(), Residual()), True),
        (sublayer(Mixing()), False),  # nothing behind it that makes a sum
        (sublayer(Mixing(), nn.Identity()), False),  # which is given one value
        (sublayer(Mixing(), nn.ModuleList([Residual()])), False),  # not called
        (nn.Sequential(nn.LayerNorm(8), Mixing(), Residual()), False),  # a module of its own
    ],
)
def test_lists_begin_blocks_if_all_of_them_end_in_a_residual(other, leads):
    attending = [sublayer(Attending(), Residual()) for _ in range(2)]
    model = module(layers=nn.ModuleList([attending[0], other, attending[1], other]))
    try:
        found = [block.name for block in find_anatomy(model).blocks if block.parts]
    except ValueError:
        found = []
    assert found == (["layers.0", "layers.2"] if leads else [])


def test_modules_in_lists_that_torch_does_not_know_may_be_blocks():
    """Blocks that are held twice in such lists."""
    plain = PlainDecoder()
    model = Running(
        lambda m, ids: m.body[2](m.body[1](m.body[0](m.tokens(ids)))), tokens=plain.tokens,
        _everything=[plain.tokens, *plain.blocks], body=[*plain.blocks],
    )  # fmt: skip
    for blocks in (None, r"body\.\d", model.body):
        anatomy = find_anatomy(model, blocks)
        assert [block.name for block in anatomy.blocks] == ["body.0", "body.1", "body.2"]
        assert anatomy.stacks[0].owner is model
    for layer in look(model, batch(4, 6)).snapshot().layers:
        assert {"hidden", "token_ids"} <= layer.captured.keys()
        assert layer.index == 0 or "visible" in layer.captured


# -- attentions ----------------------------------------------------------------------------------


def both(**decoder):
    encoder = module(layers=listed(Attending, Attending))
    return module(encoder=encoder, decoder=two(**decoder))


# A model -> the labels of the attentions of a block of its last stack.
LABELS = {
    "a second one": (lambda: two(attn1=Attending, attn2=Attending), ["", "attn2"]),
    "of one name": (
        lambda: two(a=lambda: module(x=Attending()), b=lambda: module(x=Attending())), ["", "b.x"]
    ),
    "in a list": (
        lambda: two(inner=lambda: listed(Attending, Attending, Attending), mix=lambda: Mixing(64)),
        ["", "attention_2", "attention_3"],
    ),
    "half as wide, and no list": (lambda: two(a=half, b=half), ["", "b"]),
    "heads in a list": (lambda: two(heads=lambda: listed(half, half)), ["", ""]),
    "to another stack": (encoder_decoder, ["", "cross"]),
    "the own one behind": (
        lambda: both(encoder_attn=Attending, self_attn=Attending), ["cross", ""]
    ),
    "the second of a later stack": (
        lambda: both(own=Attending, source=Attending, more=Attending), ["", "cross", "more"]
    ),
    "the second of the only stack": (
        lambda: two(own=Attending, source=Attending, more=Attending), ["", "source", "more"]
    ),
    "alone, under the name of a second": (
        lambda: two(multihead_attn=lambda: nn.MultiheadAttention(8, 2)), [""]
    ),
    "to something else alone": (
        lambda: module(layers=listed(Attending, lambda: module(cross_attn=Attending()))), ["cross"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LABELS)
def test_attentions_of_a_block_have_labels_and_one_is_its_own(case):
    make, labels = LABELS[case]
    stack = find_anatomy(make()).stacks[-1]
    block = stack.blocks[-1]
    assert [each.label for each in block.attentions] == labels
    assert stack.side_labels == [label for label in labels if label]
    assert [each.is_head for each in block.attentions] == [case == "heads in a list"] * len(labels)
    assert [each.cross for each in block.attentions] == [label == "cross" for label in labels]
    assert block.attends == ("" in labels)
    for label in labels:
        assert block.attention_index(label) == labels.index(label)


def matrix(*shape: int, **says) -> nn.Module:
    """A module with a weight, which may say its widths."""
    return behind(nn.Module(), weight=nn.Parameter(torch.zeros(shape)), **says)


SEPARATE = (
    "q_proj k_proj, query key, q_lin k_lin, query_proj key_proj, q k, wq wk, to_q to_k, Wq Wk, "
    "linear_q linear_k, project_q project_k, projection_query projection_key"
)
JOINT = (
    "q_attn c_attn, q_proj kv_proj, to_q to_kv, q kv, wq wkv, q_b_proj kv_b_proj, "
    "q_proj kv_b_proj, wq_b wkv_b, wq wkv_b"
)
LINEAR, NORMS = nn.Linear(8, 8), {"q_norm": nn.LayerNorm(8), "k_norm": nn.LayerNorm(8)}

# Children of an attention -> those that make queries and keys; None if they are not known.
PROJECTIONS = [
    *((dict.fromkeys(pair.split(), nn.Identity()), pair) for pair in SEPARATE.split(", ")),
    *((dict.fromkeys(pair.split(), nn.Identity()), pair) for pair in JOINT.split(", ")),
    *((dict.fromkeys(pair.split(), LINEAR), pair) for pair in
      ("c_q c_k", "attn_query attn_key", "wQ wK", "q_w k_w")),
    *(({name: nn.Linear(8, 24)}, name) for name in
      ["c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "to_qkv", "att_proj"]),
    ({"qkv": nn.Linear(8, 24), **NORMS}, "qkv"),
    ({"qkv": matrix(8, 24, nf=24)}, "qkv"),
    ({"qkv": matrix(2, nf=24, nx=8)}, "qkv"),
    ({"qkv": parametrize.register_parametrization(matrix(24, 8), "weight", nn.Identity())}, "qkv"),
    ({"qkv": matrix(2, out_features=24)}, None),
    ({"qkv": matrix(8, 24, 1)}, None),
    ({"qkv": nn.Conv2d(8, 24, 1)}, None),
    ({"qkv": nn.ReLU()}, None),
    (NORMS, None),
    ({"q_proj": LINEAR, "v_proj": LINEAR}, None),
    ({"q_b": nn.Linear(4, 8), "k_b": nn.Linear(2, 8)}, None),  # of two latents
    ({"freq": LINEAR, "frek": LINEAR}, None),
]  # fmt: skip


@pytest.mark.parametrize(("children", "names"), PROJECTIONS)
def test_projections_are_found_by_the_names_of_the_field(children, names):
    model = two(part=lambda: module(**children), mix=Mixing)
    found = find_anatomy(model).blocks[0].attentions
    assert [" ".join(each.projections.names) for each in found] == [names] * (names is not None)
    for each in found:
        made = [children[name] for name in each.projections.names]
        assert [each.projections.query, each.projections.key] == [made[0], made[-1]]
    shown = dict(describe(model).rows).get("Q, K projected")
    paths = " and ".join(f"part.{name}" for name in (names or "").split())
    assert shown == (None if names is None else paths if " " in names else f"{paths}, with V")


@pytest.mark.parametrize(
    ("members", "are_heads"),
    [
        ([("k", 16), ("k", 16)], True),
        ([("k", 16)] * 3, False),  # wider than their input
        ([("k", 16), ("k", 8)], False),
        ([("k", 16), ("kv", 16)], False),
        ([("k", 16), ("v", 16)], False),  # no attention
        ([("k", 32)], False),
    ],
)
def test_attentions_of_a_list_are_heads_if_they_are_together_as_wide_as_their_input(
    members, are_heads
):
    def heads():
        return nn.ModuleList(
            module(**{"q": nn.Linear(32, width), name: nn.Linear(32, width)})
            for name, width in members
        )

    found = find_anatomy(two(heads=heads, mix=Mixing)).blocks[0].attentions
    assert any(each.is_head for each in found) == are_heads


# -- tables and outputs --------------------------------------------------------------------------


def of_class(name: str, **held) -> nn.Module:
    return behind(type(name, (nn.Module,), {})(), **held)


def test_tables_are_embeddings_outside_the_blocks_and_matrices_of_such_a_class():
    def table(**more):
        return of_class("ParallelEmbedding", weight=nn.Parameter(torch.randn(50, 64)), **more)

    rotary = of_class("RotaryEmbedding", frequencies=nn.Buffer(torch.randn(64)))
    around = table(inner=nn.Linear(64, 64))  # a module around others
    model = PlainDecoder(width=64, layers=2, embedding=table(), rotary=rotary, more=around)
    model.blocks[0].inside = nn.Embedding(3, 3)
    assert set(find_anatomy(model).embeddings) == {model.embedding, model.tokens, model.places}


def test_of_several_outputs_the_one_that_shares_the_table_counts_else_the_last():
    table, head, other = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Linear(8, 50)
    model = module(table=table, layers=listed(Attending, Attending), head=head, other=other)
    model.low = nn.Linear(2, 50)  # a factor of an adapter
    assert find_anatomy(model).output is other
    head.weight = table.weight
    assert find_anatomy(model).output is head
    narrow = module(table=table, layers=listed(Attending, Attending), head=nn.Linear(6, 50))
    assert find_anatomy(narrow).output is narrow.head


def test_tables_and_heads_in_lists_that_torch_does_not_know_are_found():
    table, head, model = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Module()
    model.body, model.tables = [Attending(), Attending()], {"tokens": module(table=table)}
    model.heads = [behind(nn.Module(), parts=(module(head=head),))]
    anatomy = find_anatomy(model)
    assert (anatomy.embeddings, anatomy.output, anatomy.of_output) == ((table,), head, (table,))
    assert anatomy.adapted == ()


def factored(base: nn.Linear, **widths) -> nn.Module:
    """A matrix with another one of low rank beside it."""
    first, second = nn.Linear(32, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
    widths = {"in_features": 32, "out_features": base.out_features, **widths}
    return Running(
        lambda m, x: m.base(x) + m.second(m.first(x)), base=base.requires_grad_(False),
        first=first, second=second, **widths,
    )  # fmt: skip


def copied(original: nn.Linear) -> nn.Module:
    """A module that is frozen, and the copy of it that is trained in its place."""
    trained = copy.deepcopy(original).requires_grad_(True)
    original.requires_grad_(False)
    return Running(lambda m, x: m.trained(x), trained=trained, original=original)


# What is around an output, the output, and whether something is added to it.
AROUND = {
    "nothing": (lambda head: head, lambda model: model.head, False),
    "factors": (factored, lambda model: model.head.base, True),
    "nothing of its own": (
        lambda head: behind(factored(head), first=None, second=None),
        lambda model: model.head.base, False,
    ),
    "a module of another width": (
        lambda head: factored(head, in_features=31), lambda model: model.head.base, False
    ),
    "a copy": (copied, lambda model: model.head.trained, False),
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", AROUND)
def test_the_output_is_no_factor_of_an_adapter_and_no_frozen_original(case, tied):
    around, output, is_adapted = AROUND[case]
    model = PlainDecoder().requires_grad_(case == "nothing")
    if tied:
        model.head.weight = model.tokens.weight
    model.head = around(model.head)
    anatomy = find_anatomy(model)
    assert anatomy.output is output(model)
    assert anatomy.adapted == ((output(model),) if is_adapted else ())
