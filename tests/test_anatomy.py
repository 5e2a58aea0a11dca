import pytest
import torch
from models import PlainDecoder, transformer
from torch import nn

from geomon.anatomy import find_anatomy, shown_name

FIRST = {"gpt2": "transformer.h.0", "llama": "model.layers.0", "bert": "encoder.layer.0"}


@pytest.mark.parametrize("name", FIRST)
def test_blocks_of_transformers_models(name):
    anatomy = find_anatomy(transformer(name))
    assert next(block.name for block in anatomy.blocks) == FIRST[name]
    assert len(anatomy.blocks) == 3
    assert all(block.projections is not None for block in anatomy.blocks)
    assert anatomy.blocks[0].projections.fused == (name == "gpt2")


def test_experts_inside_blocks_are_not_blocks():
    class Expert(nn.Sequential):
        pass

    def expert():
        return Expert(nn.Linear(64, 256), nn.Linear(256, 64))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(expert() for _ in range(16))

    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(2))})
    assert [block.name for block in find_anatomy(model).blocks] == ["layers.0", "layers.1"]


def test_the_larger_stack_is_taken_and_the_smaller_can_be_named():
    model = nn.Module()
    model.small = PlainDecoder(width=16, layers=5)
    model.large = PlainDecoder(width=64, layers=2)
    assert find_anatomy(model).blocks[0].name == "large.blocks.0"
    assert len(find_anatomy(model, r"small\.blocks\.\d+").blocks) == 5
    chosen = list(model.small.blocks)[1:3]
    assert [b.module for b in find_anatomy(model, chosen).blocks] == chosen


def test_wrappers_do_not_show_in_names():
    model = nn.DataParallel(torch.compile(PlainDecoder()))
    assert find_anatomy(model).blocks[1].name == "blocks.1"
    assert shown_name("module._forward_module.a.module_list.0") == "a.module_list.0"


def test_one_block_is_enough():
    assert len(find_anatomy(PlainDecoder(layers=1)).blocks) == 1


def test_models_without_blocks_are_refused_in_one_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no transformer blocks in Sequential") as error:
        find_anatomy(model)
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got str"):
        find_anatomy("gpt2")
    with pytest.raises(ValueError, match="no module's name matches"):
        find_anatomy(PlainDecoder(), "layers")
    with pytest.raises(ValueError, match="not part of PlainDecoder"):
        find_anatomy(PlainDecoder(), [nn.Linear(2, 2)])


def test_embeddings_are_those_outside_the_blocks():
    model = PlainDecoder()
    model.blocks[0].inside = nn.Embedding(3, 3)
    assert set(find_anatomy(model).embeddings) == {model.tokens, model.places}
