"""What an extra pass changes in a model is put back, or said once and not done again."""

import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from geomon import every
from geomon.capture import extra_pass
from support.measuring import watching
from support.models import PlainDecoder, Running, batch


class Stateful(nn.Module):
    """Scales rows by a number that depends on the calls before.

    Args:
        begin: Function of the module that makes its state.
        turn: Function of the module and of its input that changes the state and returns a number.
    """

    def __init__(self, begin, turn) -> None:
        super().__init__()
        begin(self)
        self.turn = turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.1 * self.turn(self, x))


def holds(value):
    """What begins with one attribute."""
    return lambda module: setattr(module, "state", value())


def does(action, number=len):
    """What changes that attribute, and makes a number of it."""

    def turn(module, x):
        action(module.state, x)
        return number(module.state)

    return turn


def sets(function, number=float):
    def turn(module, x):
        module.state = function(module.state, x)
        return 0.0 if module.state is None else number(module.state)

    return turn


def draws(function):
    return lambda module, x: function(module.state)


def parameter(**options):
    return holds(lambda: nn.Parameter(torch.ones(1), **options))


def buffer(module):
    module.register_buffer("state", torch.zeros(1), persistent=False)


@torch.no_grad()
def decays(parameter, x):
    parameter.mul_(0.9)


def decays_by_data(parameter, x):
    parameter.data.mul_(0.9)


def has_other_data(parameter, x):
    parameter.data = parameter.data * 0.9


def grows(parameter, x):
    parameter.data = torch.ones(len(parameter) + 1)


def makes(name, make):
    """What makes a part of the module in its first call."""

    def turn(module, x):
        if getattr(module, name, None) is None:
            setattr(module, name, make())
        made = getattr(module, name)
        weight = made.weight if isinstance(made, nn.Module) else made
        return weight.sum() + torch.rand(1)

    return turn


def forgets(module, x):
    found = getattr(module, "state", 0.0)
    vars(module).pop("state", None)
    return found


def hooks_once(module, x):
    if not module.state:
        module.register_forward_hook(lambda module, args, output: output * 1.1)
    module.state = True
    return 1.0


def scripted(module):
    module.state = nn.ModuleList([torch.jit.script(nn.BatchNorm1d(32))])


def counted_norm(module, x):
    module.state[0](x.flatten(0, 1))
    return module.state[0].num_batches_tracked.item()


KINDS = {
    "list": (holds(list), does(lambda s, x: s.append(x.mean()))),
    "deque": (holds(lambda: deque([0] * 3, maxlen=3)), does(lambda s, x: s.append(len(s)), sum)),
    "containers in containers": (
        holds(lambda: {"a": ([deque()],)}),
        does(lambda s, x: s["a"][0][0].append(x), lambda s: len(s["a"][0][0])),
    ),
    "a tensor in a list": (
        holds(lambda: [torch.zeros(1)]), does(lambda s, x: s[0].add_(1), lambda s: s[0].item())
    ),
    "a tensor with a graph": (
        holds(lambda: nn.Parameter(torch.ones(1)) * 1), does(decays, lambda s: s.item())
    ),
    "number": (holds(int), sets(lambda s, x: s + 1)),
    "a tensor to None": (
        holds(lambda: torch.ones(1)), sets(lambda s, x: None if s is not None else torch.ones(1))
    ),
    "an attribute that goes": (holds(lambda: 1.0), forgets),
    "an array": (
        holds(lambda: np.zeros(1)), does(lambda s, x: np.add(s, 1, out=s), lambda s: s.item())
    ),
    "torch.Generator": (
        holds(lambda: torch.Generator().manual_seed(1)),
        draws(lambda s: torch.rand(1, generator=s)),
    ),
    "a generator in a list": (
        holds(lambda: [torch.Generator().manual_seed(1)]),
        draws(lambda s: torch.rand(1, generator=s[0])),
    ),
    "NumPy's generator": (holds(lambda: np.random.default_rng(1)), draws(lambda s: s.random())),
    "NumPy's RandomState": (holds(lambda: np.random.RandomState(1)), draws(lambda s: s.rand())),
    "Python's generator": (holds(lambda: random.Random(1)), draws(lambda s: s.random())),
    "a codebook": (parameter(requires_grad=False), does(decays, lambda s: s)),
    "a codebook with gradient": (parameter(), does(decays_by_data, lambda s: s)),
    "a parameter that is frozen at times": (
        parameter(), does(lambda s, x: s.requires_grad_(not s.requires_grad), lambda s: s)
    ),
    "other data of a parameter": (parameter(), does(has_other_data, lambda s: s)),
    "a parameter that grows": (parameter(requires_grad=False), does(grows)),
    "a parameter that is made": (
        lambda module: module.register_parameter("state", None),
        makes("state", lambda: nn.Parameter(torch.rand(1))),
    ),
    "a module that is made": (
        lambda module: None,
        makes("inner", lambda: nn.Linear(1, 1)),
    ),
    # As transformers does it: both of them, or neither.
    "a hook and a flag": (holds(bool), hooks_once),
    "a hidden module": (holds(lambda: [nn.BatchNorm1d(32)]), counted_norm),
    "a module that is compiled by torch.jit": (scripted, counted_norm),
    "a buffer": (buffer, does(lambda s, x: s.add_(1), float)),
    "a buffer, unseen by its version": (buffer, does(lambda s, x: s.data.add_(1), float)),
    "another buffer": (buffer, sets(lambda s, x: s + 1)),
    "a buffer that is made": (
        lambda module: module.register_buffer("state", None),
        makes("state", lambda: torch.rand(1)),
    ),
}  # fmt: skip


# More than is copied of parameters.
LARGE = (
    holds(lambda: nn.Parameter(torch.ones(2**21 + 1), requires_grad=False)),
    does(decays, lambda s: s[0].item()),
)


class Decoder(PlainDecoder):
    """A compiled module as any, which costs the compiler nothing."""

    @torch.compiler.disable
    def forward(self, ids):
        return super().forward(ids)


def built(begin, turn):
    torch.manual_seed(0)
    model = Decoder(layers=1)
    for block in model.blocks:
        block.mlp.append(Stateful(begin, turn))
    return model


def trained(model, how, *, watched, around=nullcontext):
    """Losses of a few steps and what the model returns then; with extra passes, or without."""
    torch.compiler.reset()
    if how == "twin":
        model.compile(backend="eager")
    metrics = {"rows": lambda hidden: float(len(hidden))}
    probe = batch(2, 8, seed=1) if how == "probe" else None
    monitor, _ = watching(model, metrics=metrics, tokens=16, probe=probe, strict=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(3):
        if how == "unprotected":
            with torch.no_grad():
                model(batch(2, 8, seed=1))
        with around(), monitor(step) if watched else nullcontext():
            loss = model(batch(2, 8)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    with torch.no_grad():
        found += model(batch(2, 8)).flatten().tolist()
    return found


@functools.cache
def plain(kind):
    return trained(built(*KINDS[kind]), "", watched=False)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("how", ["probe", "twin"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_state_trains_as_without_extra_passes(kind, how):
    assert trained(built(*KINDS[kind]), how, watched=True) == plain(kind)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_state_would_be_noticed(kind):
    assert trained(built(*KINDS[kind]), "unprotected", watched=False) != plain(kind)


CACHED = (
    holds(lambda: parametrizations.weight_norm(nn.Linear(32, 32))),
    lambda module, x: module.state(x),
)


@pytest.mark.parametrize("how", ["probe", "twin"])
def test_weights_that_are_cached_are_not_those_of_an_extra_pass(how):
    plain = trained(built(*CACHED), "", watched=False, around=parametrize.cached)
    found = trained(built(*CACHED), how, watched=True, around=parametrize.cached)
    assert found == plain


# -- what cannot be put back ---------------------------------------------------------------------


def passes(model, action=lambda model: model(batch(2, 8)), times=3):
    """Make some extra passes; returns how many were made, and why others were not."""
    made, refused = 0, set()

    def counted(model):
        nonlocal made
        made += 1
        return action(model)

    for _ in range(times):
        try:
            extra_pass(model, counted, nullcontext())
        except ValueError as error:
            refused.add(str(error))
    return made, refused


def test_parameters_too_large_to_copy_are_found_once_and_no_other_pass_is_made(caplog):
    model = built(*LARGE)
    made, refused = passes(model)
    name = "blocks.0.mlp.3.state"
    assert (made, len(refused), len(caplog.records)) == (1, 1, 1)
    assert name in refused.pop()
    assert name in caplog.text
    assert passes(nn.Sequential(model))[0] == 0
    assert passes(built(*KINDS["list"]))[0] == 3
    assert len(caplog.records) == 1


def twice():
    """5 MiB of the 8 that are copied, in two modules."""
    held = nn.Parameter(torch.ones(5 * 2**18), requires_grad=False)
    blocks = (Stateful(holds(lambda: held), does(decays, lambda s: s[0])) for _ in "ab")
    return nn.Sequential(*blocks)


def holding(**held):
    return Running(len, **held)


def fixed(array):
    array.flags.writeable = False
    return array


def is_given_data(model):
    model.state.data = torch.ones(3, 3)


# What is held, what a pass does to it, what is looked at, and whether that is as before.
PUT_BACK = {
    "a parameter of two modules": (
        twice, lambda model: model(torch.ones(1)), lambda model: model[0].state.mean(), True
    ),
    "other data of a large parameter": (
        lambda: built(LARGE[0], does(has_other_data, lambda s: s[0].item())),
        lambda model: model(batch(2, 8)),
        lambda model: (model.blocks[0].mlp[-1].state.data_ptr(), model.blocks[0].mlp[-1].state[0]),
        True,
    ),
    "the sign of a zero": (
        lambda: holding(state=nn.Buffer(torch.zeros(3))), lambda model: model.state.neg_(),
        lambda model: model.state.signbit().tolist(), True,
    ),
    "an array of one mebibyte, beside one that cannot be written": (
        lambda: holding(state=np.zeros(2**17), fixed=fixed(np.zeros(3))),
        lambda model: model.state.fill(1), lambda model: model.state.any(), True,
    ),
    "a larger array": (
        lambda: holding(state=np.zeros(2**17 + 1)), lambda model: model.state.fill(1),
        lambda model: model.state.any(), False,
    ),
    # As DeepSpeed does: no data before the pass, and perhaps some after it.
    "data that another library gathers": (
        lambda: holding(state=nn.Parameter(torch.empty(0))), is_given_data,
        lambda model: model.state.numel(), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PUT_BACK)
def test_what_is_held_is_put_back_up_to_a_size(case):
    make, changes, value, is_put_back = PUT_BACK[case]
    model = make()
    before = value(model)
    assert passes(model, changes) == (3, set())
    assert (value(model) == before) == is_put_back


@pytest.mark.parametrize(
    ("parameters", "copied"),
    [
        ([(2**21, False)], [True]),  # 8 MiB
        ([(2**21, True), (1, False)], [False, True]),
        ([(1, True), (2**21, False)], [False, True]),
        ([(2**20 + 1, True), (2**20, True)], [False, True]),
    ],
)
def test_parameters_without_gradient_and_small_ones_are_copied_first(parameters, copied):
    model = nn.ParameterList(
        nn.Parameter(torch.ones(size), requires_grad=trained) for size, trained in parameters
    )
    passes(model, lambda model: [decays(each, None) for each in model], times=1)
    assert [each[0].item() == 1 for each in model] == copied


@pytest.mark.parametrize("how", ["probe", "twin"])
def test_a_model_that_takes_no_extra_pass_trains_on(how, caplog, failures):
    model, once = built(*LARGE), built(*LARGE)
    passes(once, times=1)
    assert trained(model, how, watched=True) == trained(once, "", watched=False)
    said = [record.getMessage() for record in caplog.records]
    assert sum("writes into blocks.0.mlp.3.state" in words for words in said) == 2
    failures.clear()


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "of 8 bits": lambda: torch.zeros(3).to(torch.float8_e4m3fn),
    "meta": lambda: torch.ones(3, device="meta"),
    "expanded": lambda: torch.ones(1).expand(3),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "inference": lambda: torch.inference_mode()(torch.ones)(3),
    "not a number": lambda: torch.full((3,), torch.nan),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_of_any_kind_are_held_by_a_model(kind):
    model = holding(buffer=nn.Buffer(ODD[kind]()), held=[ODD[kind]()])
    assert passes(model, lambda model: None) == (3, set())


def test_objects_are_the_same_ones_with_their_former_contents():
    held = [[1], {"a": {2}}, deque([3], maxlen=4), OrderedDict(b=4), defaultdict(list, c=[5])]
    model, inner = holding(state=held), [*held]

    def changes(model):
        for part in (*held, held[1]["a"]):
            part.clear()
        held.append(6)
        model.state = None

    assert passes(model, changes) == (3, set())
    assert model.state is held
    assert all(one is other for one, other in zip(held, inner, strict=True))
    assert repr(held) == repr(
        [[1], {"a": {2}}, deque([3], maxlen=4), OrderedDict(b=4), defaultdict(list, c=[5])]
    )


@pytest.mark.parametrize(
    ("levels", "items", "looked_into"),
    [(4, 1, True), (5, 1, False), (1, 1000, True), (1, 1001, False)],
)
def test_containers_are_looked_into_four_deep_and_up_to_a_thousand_items(
    levels, items, looked_into
):
    innermost: list[int] = []
    model = holding(held=innermost)
    for _ in range(levels):
        model.held = [model.held] * items
    assert passes(model, lambda model: innermost.append(1), times=1) == (1, set())
    assert (innermost == []) == looked_into


def test_what_cannot_be_put_back_is_an_error_and_the_rest_is_put_back():
    model = holding(before=[], array=np.zeros(3), behind=[])

    def changes(model):
        model.before.append(1)
        model.behind.append(1)
        model.array.flags.writeable = False

    with pytest.raises(ValueError, match="read-only"):
        extra_pass(model, changes, nullcontext())
    assert model.before == model.behind == []


def test_an_object_of_the_users_is_not_looked_into():
    class Records:
        def __iter__(self):
            raise AssertionError("looked into")

        __len__ = __getattr__ = __eq__ = __iter__
        __hash__ = object.__hash__

    model = holding(records=Records())
    vars(model)["lost"] = weakref.proxy(set())
    assert passes(model, lambda model: None) == (3, set())


# -- names of torch that a release may take away -------------------------------------------------


def test_without_the_cache_of_parametrised_weights_only_models_with_some_are_refused(monkeypatch):
    monkeypatch.delattr(parametrize, "_cache")
    assert passes(built(*KINDS["list"]))[0] == 3
    made, refused = passes(built(*CACHED))
    assert made == 0
    assert "parametrised weights" in refused.pop()


@pytest.fixture
def fsdp(monkeypatch):
    """Stands for `torch.distributed.fsdp`; with several ranks it is tested itself."""

    class FSDPModule(nn.Module):
        asked = 0

        def reshard(self) -> None:
            type(self).asked += 1

    class FullyShardedDataParallel(nn.Module): ...

    found = types.ModuleType("torch.distributed.fsdp")
    found.FSDPModule, found.FullyShardedDataParallel = FSDPModule, FullyShardedDataParallel
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", found)
    return found


@pytest.mark.parametrize("how", ["normal", "exception"])
def test_parameters_that_fsdp_gathered_are_sharded_again(how, fsdp):
    model = nn.Sequential(fsdp.FSDPModule(), nn.Linear(2, 2))

    def run(model):
        if how == "exception":
            raise RuntimeError

    with suppress(RuntimeError):
        extra_pass(model, run, nullcontext())
    assert fsdp.FSDPModule.asked > 0


@pytest.mark.parametrize(
    "name",
    ["_handle", "uses_sharded_strategy", "needs_unshard", "reshard", "post_reshard", "_prefetched"],
)
def test_without_a_name_of_fsdp1_no_pass_is_made_on_its_modules(name, fsdp):
    model = fsdp.FullyShardedDataParallel()
    model._handle = types.SimpleNamespace(
        uses_sharded_strategy=True, needs_unshard=lambda: False, reshard=lambda free: None,
        post_reshard=lambda: None, _prefetched=True,
    )  # fmt: skip
    assert passes(model, lambda model: None) == (3, set())
    delattr(model if name == "_handle" else model._handle, name)
    made, refused = passes(model, lambda model: None)
    assert made == 0
    assert "could not be sharded again" in refused.pop()


# -- what an extra pass may have changed elsewhere is said -----------------------------------------


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def fails_without_gradients(module, args):
    if not torch.is_grad_enabled():
        raise ValueError("the model is only trained")


# Options of a monitor, whether blocks are compiled later, and whether looks take extra passes.
LOOKS = {
    "probe": (lambda: {"probe": batch()}, False, True),
    "probe of batches": (lambda: {"probe": iter([batch(), batch()])}, False, True),
    "compiled": (dict, True, True),
    "compiled, at a check": (
        lambda: {"schedule": lambda step: step == 2, "checks": every(1)},
        True,
        True,
    ),
    "the training's own pass": (dict, False, False),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("look", LOOKS)
def test_an_extra_pass_is_said_once_in_the_log_and_the_record_however_it_ends(
    look, fails, caplog, fresh_compiler, failures
):
    make_options, compiles, is_extra = LOOKS[look]
    calls = []  # outside of the model
    model = PlainDecoder()
    model.register_forward_pre_hook(lambda *given: calls.append(1))
    if fails:
        model.blocks[1].register_forward_pre_hook(fails_without_gradients)
    monitor, memory = watching(model, strict=False, **make_options())
    for step in range(3):  # the first is read in any case
        for block in model.blocks if compiles and step == 1 else ():
            block.compile(backend="eager")
        if step == 2:  # from here on nothing fails
            said = [text for text in caplog.messages if "an extra pass of the model" in text]
            assert len(said) == is_extra
            model.blocks[1]._forward_pre_hooks.clear()
        with monitor(step):
            model(batch())
    monitor.close()
    failures.clear()
    assert (len(calls) > 3) == is_extra
    notes = [note.kind for reading in memory.readings for note in reading.notes]
    assert notes.count("extra pass") == is_extra
