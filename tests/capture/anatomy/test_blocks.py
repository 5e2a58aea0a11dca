import pytest
import torch
from models import PlainDecoder
from torch import nn

from geomon.capture import Window
from geomon.capture.anatomy import find_anatomy, shown_name
from geomon.capture.anatomy.families import LeftOut
from geomon.capture.snapshot import CAPTURED


def test_experts_inside_blocks_are_not_blocks():
    def block():
        experts = (nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(16))
        return module(experts=nn.ModuleList(experts))

    model = module(layers=layers(block, block))
    assert [block.name for block in find_anatomy(model).blocks] == ["layers.0", "layers.1"]


def test_a_stack_of_few_parameters_is_left_out_and_can_be_named():
    model = nn.Module()
    model.small = PlainDecoder(width=8, layers=2)
    model.large = PlainDecoder(width=64, layers=2)
    anatomy = find_anatomy(model)
    assert [block.name for block in anatomy.blocks] == ["large.blocks.0", "large.blocks.1"]
    assert anatomy.left_out == (
        LeftOut("small.blocks.#", 2, "few parameters compared with the largest stack"),
    )
    model.small = PlainDecoder(width=16, layers=5)
    assert len(find_anatomy(model, r"small\.blocks\.\d+").blocks) == 5
    chosen = list(model.small.blocks)[1:3]
    assert [b.module for b in find_anatomy(model, chosen).blocks] == chosen


def test_wrappers_do_not_show_in_names():
    plain = PlainDecoder()
    plain.final_norm = nn.LayerNorm(32)
    model = nn.DataParallel(torch.compile(plain))
    for anatomy in (find_anatomy(model), find_anatomy(model, r"blocks\.\d")):
        assert anatomy.blocks[1].name == "blocks.1"
        assert ("final_norm", plain.final_norm) in anatomy.norms
        assert {type(norm) for _, norm in anatomy.norms} == {nn.LayerNorm}
    assert shown_name("module._forward_module.a.module_list.0") == "a.module_list.0"


def test_models_without_blocks_are_refused_in_one_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no transformer blocks in Sequential") as error:
        find_anatomy(model)
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got str"):
        find_anatomy("gpt2")
    with pytest.raises(ValueError, match="no module's full name matches"):
        find_anatomy(PlainDecoder(), "layers")
    with pytest.raises(ValueError, match="not part of PlainDecoder"):
        find_anatomy(PlainDecoder(), [nn.Linear(2, 2)])


def test_a_matrix_whose_class_is_called_an_embedding_is_a_table():
    class ParallelEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(50, 64))

    class RotaryEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.randn(64))

    model = PlainDecoder(width=64, layers=2)
    model.embed, model.rotary, model.more = (
        ParallelEmbedding(), RotaryEmbedding(), ParallelEmbedding()
    )  # fmt: skip
    model.more.inner = nn.Linear(64, 64)  # a module around others
    assert set(find_anatomy(model).embeddings) == {model.embed, model.tokens, model.places}


def test_embeddings_are_those_outside_the_blocks():
    model = PlainDecoder()
    model.blocks[0].inside = nn.Embedding(3, 3)
    assert set(find_anatomy(model).embeddings) == {model.tokens, model.places}


# -- stacks ------------------------------------------------------------------------------------


def names(model: nn.Module, **kwargs) -> dict[str, list[str]]:
    stacks = find_anatomy(model, **kwargs).stacks
    return {stack.name: [block.name for block in stack.blocks] for stack in stacks}


class Attending(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.mlp = nn.Linear(width, 4 * width)


class Half(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 4), nn.Linear(8, 4)


class Mixing(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 6 * width)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)


def module(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def layers(*kinds) -> nn.ModuleList:
    return nn.ModuleList(kind() for kind in kinds)


def test_the_attention_to_another_stack_is_told_from_a_blocks_own():
    encoder, decoder = find_anatomy(nn.Transformer(16, 2, 1, 1, 32, batch_first=True)).stacks
    assert [(a.name, a.cross) for a in encoder.blocks[0].attentions] == [("self_attn", False)]
    found = [(a.name, a.cross) for a in decoder.blocks[0].attentions]
    assert found == [("self_attn", False), ("multihead_attn", True)]
    assert decoder.blocks[0].attention_index("cross") == 1
    # A block may have its own attention behind the other one, as one that is exchanged later has.
    behind = lambda: module(encoder_attn=Attending(), self_attn=Attending())  # noqa: E731
    both = module(encoder=module(layers=layers(Attending)), decoder=module(layers=layers(behind)))
    block = find_anatomy(both).stacks[1].blocks[0]
    assert block.attends
    assert [a.label for a in block.attentions] == ["cross", ""]
    # Without a name that says so, the second one of a later stack is to another.
    plain = lambda: module(own=Attending(), source=Attending(), more=Attending())  # noqa: E731
    both = module(encoder=module(layers=layers(plain)), decoder=module(layers=layers(plain)))
    labels = [[a.label for a in stack.blocks[0].attentions] for stack in find_anatomy(both).stacks]
    assert labels == [["", "source", "more"], ["", "cross", "more"]]
    alone = find_anatomy(layers(lambda: module(multihead_attn=nn.MultiheadAttention(8, 2))))
    assert not alone.blocks[0].attentions[0].cross
    only = module(layers=layers(Attending, lambda: module(cross_attn=Attending())))
    first, second = find_anatomy(only).blocks
    assert (first.attends, second.attends) == (True, False)
    assert second.attention_index("cross") == 0


@pytest.mark.parametrize(
    ("block", "labels"),
    [
        (lambda: module(attn1=Attending(), attn2=Attending()), ["", "attn2"]),
        (lambda: module(a=module(x=Attending()), b=module(x=Attending())), ["", "inner.b.x"]),
        (lambda: layers(Attending, Attending, Attending), ["", "attention_2", "attention_3"]),
        (lambda: module(a=Half(), b=Half()), ["", "b"]),  # as wide as two heads, and no list
        (lambda: module(cross=layers(Half, Half)), ["cross", "attention_2"]),
    ],
)
def test_further_attentions_of_a_block_have_labels_of_their_own(block, labels):
    model = module(layers=layers(*[lambda: module(inner=block())] * 2))
    stack = find_anatomy(model, blocks=r"layers\.\d+").stacks[0]
    assert [a.label for a in stack.blocks[0].attentions] == labels
    assert stack.side_labels == [label for label in labels if label]


def test_heads_that_are_modules_of_a_list_are_those_of_the_own_attention():
    model = module(layers=layers(*[lambda: module(heads=layers(Half, Half))] * 2))
    heads = find_anatomy(model).blocks[0].attentions
    assert [(head.label, head.is_head) for head in heads] == [("", True)] * 2


def test_of_several_outputs_the_one_that_shares_the_table_counts_else_the_last():
    table, head, other = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Linear(8, 50)
    model = module(table=table, layers=layers(Attending, Attending), head=head, other=other)
    model.low = nn.Linear(2, 50)  # a factor of an adapter
    assert find_anatomy(model).output is other
    head.weight = table.weight
    assert find_anatomy(model).output is head
    narrow = module(table=table, layers=layers(Attending, Attending), head=nn.Linear(6, 50))
    assert find_anatomy(narrow).output is narrow.head


def test_the_owner_is_the_innermost_module_of_which_one_call_runs_all_blocks():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    assert [x.owner for x in find_anatomy(model).stacks] == [model.encoder, model.decoder]
    group = module(inner=layers(Attending, Attending))  # which may be called several times
    shared = module(groups=nn.ModuleList([group]))
    assert find_anatomy(shared).stacks[0].owner is shared


def test_modules_above_several_stacks_are_those_of_the_first_and_no_list_owns_its_blocks():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    above = [stack.above for stack in find_anatomy(model).stacks]
    assert above == [(model, model.encoder), (model.decoder,)]
    assert [*names(module(inner=module(model=model)))] == ["encoder", "decoder"]
    one, two, three = (module(layers=layers(Attending, Attending)) for _ in range(3))
    nested = module(a=module(x=one, y=two), b=three)
    assert [*names(nested)] == ["a.x", "a.y", "b.layers"]
    iterated = module(body=nn.Sequential(Attending(), Attending()))
    assert find_anatomy(iterated).stacks[0].owner is iterated
    root = nn.Sequential(Attending(), Attending())
    root.side = layers(Attending, Attending)
    assert names(root) == {"main": ["0", "1"], "side": ["side.0", "side.1"]}


def test_a_sequential_may_alternate_and_have_other_ends():
    mixer = nn.Sequential(*(kind() for kind in (Mixing, Head) * 3))
    assert len(find_anatomy(mixer).blocks) == 6
    whole = nn.Sequential(
        nn.Embedding(9, 8), Head(), *(Attending() for _ in range(4)), nn.LayerNorm(8), Mixing()
    )
    assert names(whole) == {"": ["2", "3", "4", "5"]}


def test_blocks_of_stages_are_one_stack():
    def stage(width, count):
        return module(blocks=nn.ModuleList(Attending(width) for _ in range(count)), down=Head())

    windowed = module(layers=nn.ModuleList([stage(8, 2), stage(16, 3)]))
    assert names(windowed)[""][1:3] == ["layers.0.blocks.1", "layers.1.blocks.0"]

    def convolutions(width, count):
        blocks = (nn.Sequential(nn.Conv2d(width, width, 3), nn.ReLU()) for _ in range(count))
        return nn.Sequential(*blocks)

    residual = module(layer1=convolutions(8, 2), layer2=convolutions(16, 3), fc=nn.Linear(16, 2))
    assert names(residual) == {"": ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"]}
    same = module(stages=nn.ModuleList([stage(8, 2), stage(8, 2)]))
    assert len(names(same)[""]) == 4
    beside = module(encoder1=stage(8, 2), encoder2=stage(8, 2))
    assert list(names(beside)) == ["encoder1", "encoder2"]
    one_each = module(encoder1=stage(8, 1), encoder2=stage(8, 1))
    assert names(one_each) == {"": ["encoder1.blocks.0", "encoder2.blocks.0"]}
    listed = [nn.Sequential(Attending(), Attending()) for _ in range(2)]
    assert len(names(module(layer1=listed[0], layer2=listed[1]))[""]) == 4


def test_stages_of_convolutions_and_of_attention_are_one_stack_of_their_blocks():
    def stage(kind, count):
        return nn.Sequential(nn.Sequential(*(kind() for _ in range(count))))

    model = module(stages=nn.Sequential(stage(Mixing, 2), stage(Mixing, 3), stage(Attending, 4)))
    assert [block.attends for block in find_anatomy(model).blocks] == [False] * 5 + [True] * 4
    assert find_anatomy(model).left_out == ()
    hybrid = (lambda: module(parts=layers(Mixing))), (lambda: module(parts=layers(Attending)))
    assert names(module(layers=layers(*hybrid))) == {"": ["layers.0", "layers.1"]}


def test_stages_of_mixed_members_are_blocks_and_their_members_can_be_named():
    def attending():
        return module(attn=Attending())

    mixed = [nn.Sequential(Mixing(), Mixing()), nn.Sequential(Mixing(), attending(), attending())]
    anatomy = find_anatomy(module(stages=nn.Sequential(*(module(blocks=m) for m in mixed))))
    assert [block.name for block in anatomy.blocks] == ["stages.0", "stages.1"]
    named = find_anatomy(module(stages=nn.Sequential(*mixed)), blocks=r"stages\.\d+\.\d+")
    assert len(named.blocks) == 5


@pytest.mark.parametrize(
    ("first", "second", "beside"),
    [
        ([Mixing(), Mixing(), Attending()], [Mixing(), Mixing(), Attending()], 1),  # alike
        ([Mixing(8), Attending()], [Mixing(16), Attending()], 1),  # one of each class
        ([Mixing(), Mixing()], [Mixing(), Attending(), Attending()], 100),  # most is elsewhere
    ],
)
def test_what_blocks_are_made_of_is_not_said_to_be_blocks(first, second, beside):
    members = [
        module(parts=nn.Sequential(*parts), rest=nn.Linear(beside, beside))
        for parts in (first, second)
    ]
    anatomy = find_anatomy(module(layers=nn.ModuleList(members)))
    assert [block.name for block in anatomy.blocks] == ["layers.0", "layers.1"]
    assert anatomy.left_out == ()


def test_neither_one_numbered_module_nor_a_dropout_of_weights_makes_a_stack():
    def mixing():
        return module(mix=Mixing(), attn_drop=nn.Dropout())

    model = module(blocks=layers(mixing, mixing), head2=Mixing())
    assert names(model) == {"": ["blocks.0", "blocks.1"]}
    assert not any(block.attends for block in find_anatomy(model).blocks)
    two = lambda: module(attn1=Attending(), attn2=Attending())  # noqa: E731
    assert names(module(blocks=layers(two, two))) == {"": ["blocks.0", "blocks.1"]}


class Listed(PlainDecoder):
    """Holds its blocks twice in lists that torch does not know to hold modules."""

    def __init__(self) -> None:
        super().__init__()
        self._everything, self.body = [self.tokens, *self.blocks], [*self.blocks]
        del self.blocks

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.body:
            x = block(x)
        return x


@pytest.mark.parametrize("way", ["found", "by name", "given"])
def test_modules_in_lists_that_torch_does_not_know_may_be_blocks(way):
    model = Listed()
    blocks = {"found": None, "by name": r"body\.\d", "given": model.body}[way]
    anatomy = find_anatomy(model, blocks)
    assert [block.name for block in anatomy.blocks] == ["body.0", "body.1", "body.2"]
    assert anatomy.stacks[0].owner is model
    with torch.no_grad(), Window(anatomy, set(CAPTURED), rows=10, seed=0) as seen:
        model(torch.randint(0, 50, (4, 6)))
    for layer in seen.snapshot().layers:
        assert {"hidden", "token_ids"} <= layer.captured.keys()
        assert layer.index == 0 or "visible" in layer.captured


def test_tables_and_heads_in_lists_that_torch_does_not_know_are_found():
    model = nn.Module()
    table, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    model.body = [Attending(), Attending()]
    outer = nn.Module()
    outer.parts = (module(head=head),)
    model.tables, model.heads = {"tokens": module(table=table)}, [outer]
    anatomy = find_anatomy(model)
    assert (anatomy.embeddings, anatomy.output, anatomy.of_output) == ((table,), head, (table,))
    assert anatomy.adapted == ()


def test_sublayers_of_a_block_are_not_blocks():
    def t5_like():
        return module(layer=nn.ModuleList([module(att=Attending()), module(ff=Mixing())]))

    assert names(module(block=layers(t5_like, t5_like))) == {"": ["block.0", "block.1"]}
    listed, wide = lambda: layers(Attending), lambda: Mixing(16)
    for kinds in ((Mixing, Head), (Mixing, Attending), (listed, wide)):
        pairs = (layers(*kinds) for _ in range(2))
        with pytest.raises(ValueError, match="no transformer blocks"):
            find_anatomy(module(layers=nn.ModuleList(pairs)))


def test_lists_of_sublayers_stand_for_blocks_by_their_first():
    pairs = module(layers=nn.ModuleList(nn.ModuleList([Attending(), Mixing()]) for _ in range(2)))
    (stack,) = find_anatomy(pairs).stacks
    assert [block.name for block in stack.blocks] == ["layers.0.0", "layers.1.0"]
    assert stack.entering
    assert stack.owner is pairs
    for place, entering in ((0, True), (1, False)):
        (named,) = find_anatomy(pairs, blocks=rf"layers\.\d+\.{place}").stacks
        assert named.entering == entering
    alike = module(layers=nn.ModuleList(layers(Mixing, Mixing) for _ in range(2)))
    assert not find_anatomy(alike, blocks=r"layers\.\d+\.0").stacks[0].entering
    assert not find_anatomy(PlainDecoder()).stacks[0].entering


def test_stacks_without_attention_give_way_to_those_with_it():
    model = module(
        features=module(convs=layers(Mixing, Mixing, Mixing)),
        encoder=module(layers=layers(Attending, Attending)),
    )
    anatomy = find_anatomy(model)
    assert [stack.name for stack in anatomy.stacks] == [""]
    assert anatomy.blocks[0].name == "encoder.layers.0"
    assert [(x.pattern, x.count) for x in anatomy.left_out] == [("features.convs.#", 3)]
    assert "no attention was found" in anatomy.left_out[0].reason


def test_a_frozen_twin_is_left_out():
    model = module(net=PlainDecoder(), average=PlainDecoder().requires_grad_(False))
    anatomy = find_anatomy(model)
    assert [stack.name for stack in anatomy.stacks] == [""]
    assert anatomy.blocks[0].name == "net.blocks.0"
    reason = "a frozen copy of a watched stack"
    assert anatomy.left_out == (LeftOut("average.blocks.#", 3, reason),)
    frozen = PlainDecoder().requires_grad_(False)
    assert len(find_anatomy(frozen).blocks) == 3
    model.average.requires_grad_(True)
    assert [stack.name for stack in find_anatomy(model).stacks] == ["net", "average"]


def test_patterns_and_modules_may_name_blocks_of_several_stacks():
    model = nn.Transformer(16, 2, 2, 3, 32, batch_first=True)
    assert list(names(model, blocks=r"(en|de)coder\.layers\.\d+")) == ["encoder", "decoder"]
    chosen = [model.decoder.layers[2], model.encoder.layers[1]]
    assert names(model, blocks=chosen) == {
        "decoder": ["decoder.layers.2"], "encoder": ["encoder.layers.1"],
    }  # fmt: skip
    in_one_list = module(layers=layers(*[lambda: module(one=Attending(), two=Mixing())] * 2))
    assert names(in_one_list, blocks=r"layers\.\d\.\w+") == {
        "stack_1": ["layers.0.one", "layers.1.one"], "stack_2": ["layers.0.two", "layers.1.two"],
    }  # fmt: skip
