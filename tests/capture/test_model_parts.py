"""A training has a model in hand, or pipeline stages, which torch's schedules describe."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from geomon.capture import Window
from geomon.capture.model_parts import ModelParts
from support.models import PlainDecoder, batch


def stage(index, module):
    return SimpleNamespace(stage_index=index, num_stages=3, args_recv_info={}, submod=module)


def test_a_model_is_its_only_part():
    model = PlainDecoder()
    parts = ModelParts(model)
    assert (parts.root, parts.modules, parts.name) == (model, (model,), "PlainDecoder")
    assert parts.stages == parts.micro_batches == ()
    parts.check_probe([1])


@pytest.mark.parametrize("chosen", [True, False])
def test_stages_are_parts_in_their_own_order_and_some_have_no_blocks(chosen):
    modules = PlainDecoder(layers=2), PlainDecoder(layers=2), nn.Linear(2, 2)
    stages = [stage(index, modules[index]) for index in (2, 0, 1)]
    parts = ModelParts(stages)
    assert parts.modules == tuple(parts.root.children()) == modules
    blocks = [modules[1].blocks[1], modules[0].blocks[0]] if chosen else None
    stacks = parts.find_anatomy(blocks).stacks
    assert [stack.part for stack in stacks] == [0, 1]
    found = [[block.module for block in stack.blocks] for stack in stacks]
    assert found == ([blocks[1:], blocks[:1]] if chosen else [[*x.blocks] for x in modules[:2]])
    stages[1].args_recv_info.update({0: (), 1: ()})
    assert [count() for count in parts.micro_batches] == [2, 0, 0]
    for inputs in ([1], {}, type("Batch", (dict,), {"__call__": None})()):
        with pytest.raises(ValueError, match="a function that runs one pass"):
            parts.check_probe(inputs)
    parts.check_probe(len)


@pytest.mark.parametrize("name", ["_stages", "_stage"])
def test_a_schedule_is_known_by_its_stages(name):
    one = stage(0, nn.Linear(2, 2))
    schedule = SimpleNamespace(**{name: [one] if name == "_stages" else one})
    for given in (schedule, one, [one], (one,)):
        assert ModelParts(given).stages == (one,)
        assert ModelParts(given).given is given


@pytest.mark.parametrize(
    "given",
    ["model", [], [nn.Linear(2, 2)], SimpleNamespace(), stage(0, "no module"),
     SimpleNamespace(stage_index=0, num_stages=1, submod=nn.Linear(2, 2))],
)  # fmt: skip
def test_anything_else_is_refused(given):
    with pytest.raises(TypeError, match=f"expected a torch.nn.Module, got {type(given).__name__}"):
        ModelParts(given)


def test_a_stage_without_blocks_has_an_empty_snapshot():
    anatomy = ModelParts([stage(2, nn.Linear(2, 2))]).find_anatomy()
    with Window(anatomy, {"hidden"}, rows=10, seed=0) as seen:
        PlainDecoder()(batch())
    assert [snapshot.layers for snapshot in seen.snapshots()] == [[]]
    assert seen.snapshot().is_empty


def told(*, wanted, tied, change=lambda model: None):
    """Words of the note on a model whose configuration wants its matrices tied, or not."""
    model = PlainDecoder()
    if tied:
        model.head.weight = model.tokens.weight
    if wanted is not None:
        model.config = SimpleNamespace(tie_word_embeddings=wanted)
    change(model)
    parts = ModelParts(model)
    notes = parts.note_on_ties(parts.find_anatomy())
    assert all(note.is_odd for note in notes)
    assert all(note.numbers["wanted"] == str(wanted) for note in notes)
    return [note.words() for note in notes]


class Part(torch.Tensor):
    """A weight that ranks share out."""

    def to_local(self):
        return self


def share_out(name):
    def change(model):
        module = getattr(model, name)
        module.weight = nn.Parameter(module.weight.detach().as_subclass(Part))

    return change


def hold(config, name):
    """Give a part of the model a configuration of its own."""

    def change(model):
        getattr(model, name).config = SimpleNamespace(tie_word_embeddings=config)

    return change


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_that_are_not_tied_as_the_configuration_says_are_noted(wanted, tied):
    state = "one weight" if tied else "two weights"
    said = f"tie_word_embeddings is {wanted}, but embedding and unembedding are {state}"
    assert told(wanted=wanted, tied=tied) == [said] * (wanted != tied)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"wanted": None}, 0),
        ({"wanted": "yes"}, 0),
        ({"wanted": True, "change": share_out("head")}, 0),
        ({"wanted": True, "change": share_out("tokens")}, 0),
        ({"wanted": True, "change": lambda model: model.to("meta")}, 0),
        ({"wanted": True, "change": hold(False, "head")}, 0),  # the innermost one counts
        ({"wanted": True, "change": hold(False, "tokens")}, 1),  # which has no output
        ({"wanted": True, "change": hold("unknown", "head")}, 1),
        ({"wanted": True, "change": lambda model: delattr(model, "head")}, 0),
    ],
)
def test_ties_are_not_judged_if_configuration_or_weights_are_unknown(given, count):
    assert len(told(tied=False, **given)) == count


def test_a_probe_of_inputs_needs_a_model_with_a_forward():
    model = nn.Module()
    model.blocks = PlainDecoder().blocks
    parts = ModelParts(model)
    for inputs in (torch.ones(2), {"x": 1}, (1,), [1]):
        with pytest.raises(ValueError, match=r"Module has no forward\(\) to call with the inputs"):
            parts.check_probe(inputs)
    parts.check_probe(len)
    parts.check_probe(iter([1]))
