"""An extra pass leaves a model as it was, or says once what it changed and is not made again.

Most models here hold a layer whose output depends on the passes before. If an extra pass changed
its state for good, the training that follows would give other losses.
"""

import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from geomon import every
from geomon.capture import extra_pass, extra_passes, random_states_kept
from support.measuring import watching
from support.models import PlainDecoder, Running, batch

# -- layers with a state --------------------------------------------------------------------------


class StatefulLayer(nn.Module):
    """A layer that scales its input by a factor that depends on the calls before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.1 * self.next_factor(x))


class AppendsToList(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.means = []

    def next_factor(self, x):
        self.means.append(x.mean())
        return len(self.means)


class AppendsToFullDeque(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.newest = deque([0, 0, 0], maxlen=3)

    def next_factor(self, x):
        self.newest.append(3)
        return sum(self.newest)


class AppendsToNestedContainer(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.cache = {"inputs": ([deque()],)}

    def next_factor(self, x):
        inputs = self.cache["inputs"][0][0]
        inputs.append(x)
        return len(inputs)


class CountsInListedTensor(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.counts = [torch.zeros(1)]

    def next_factor(self, x):
        return self.counts[0].add_(1).item()


class DecaysTensorWithGraph(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1)) * 1

    @torch.no_grad()
    def next_factor(self, x):
        return self.scale.mul_(0.9).item()


class CountsCalls(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def next_factor(self, x):
        self.calls += 1
        return float(self.calls)


class TogglesTensorAndNone(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1)

    def next_factor(self, x):
        self.scale = None if self.scale is not None else torch.ones(1)
        return 0.0 if self.scale is None else float(self.scale)


class DeletesAttribute(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.first = 1.0

    def next_factor(self, x):
        return vars(self).pop("first", 0.0)


class MakesAttributeWhenCalled(StatefulLayer):
    def next_factor(self, x):
        is_first = not hasattr(self, "called")
        self.called = True
        return float(is_first)


class CountsInArray(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(1)

    def next_factor(self, x):
        return np.add(self.counts, 1, out=self.counts).item()


class DrawsFromTorch(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def next_factor(self, x):
        return torch.rand(1, generator=self.generator)


class DrawsFromListedGenerator(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(1)]

    def next_factor(self, x):
        return torch.rand(1, generator=self.generators[0])


class DrawsFromNumPy(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)

    def next_factor(self, x):
        return self.generator.random()


class DrawsFromRandomState(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.RandomState(1)

    def next_factor(self, x):
        return self.generator.rand()


class DrawsFromPython(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(1)

    def next_factor(self, x):
        return self.generator.random()


class DrawsFromProcess(StatefulLayer):
    """Draws from the generators that all of the process shares."""

    def next_factor(self, x):
        return random.random() + np.random.rand() + torch.rand(1)


class DecaysFrozenCodebook(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Parameter(torch.ones(1), requires_grad=False)

    def next_factor(self, x):
        return self.codebook.mul_(0.9)


class DecaysTrainedCodebook(StatefulLayer):
    """Writes past autograd, so that the version of the parameter does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Parameter(torch.ones(1))

    def next_factor(self, x):
        self.codebook.data.mul_(0.9)
        return self.codebook


class FreezesItselfAtTimes(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def next_factor(self, x):
        return self.weight.requires_grad_(not self.weight.requires_grad)


class ExchangesData(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def next_factor(self, x):
        self.weight.data = self.weight.data * 0.9
        return self.weight


class GrowsParameter(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(1), requires_grad=False)

    def next_factor(self, x):
        self.codes.data = torch.ones(len(self.codes) + 1)
        return len(self.codes)


class MakesParameterWhenCalled(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)

    def next_factor(self, x):
        if self.weight is None:
            self.weight = nn.Parameter(torch.rand(1))
        return self.weight.sum() + torch.rand(1)


class MakesModuleWhenCalled(StatefulLayer):
    def next_factor(self, x):
        if not hasattr(self, "inner"):
            self.inner = nn.Linear(1, 1)
        return self.inner.weight.sum() + torch.rand(1)


class MakesBufferWhenCalled(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def next_factor(self, x):
        if self.scale is None:
            self.scale = torch.rand(1)
        return self.scale.sum() + torch.rand(1)


class PlacesHookOnce(StatefulLayer):
    """Places a hook and sets a flag, as transformers does: both must be put back, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.has_hook = False

    def next_factor(self, x):
        if not self.has_hook:
            self.register_forward_hook(lambda module, args, output: output * 1.1)
        self.has_hook = True
        return 1.0


class HidesModuleInList(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.norms = [nn.BatchNorm1d(32)]

    def next_factor(self, x):
        self.norms[0](x.flatten(0, 1))
        return self.norms[0].num_batches_tracked.item()


class HoldsScriptedModule(HidesModuleInList):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([torch.jit.script(nn.BatchNorm1d(32))])


class CountsInBuffer(StatefulLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def next_factor(self, x):
        return float(self.count.add_(1))


class CountsInBufferUnseen(CountsInBuffer):
    """Writes past autograd, so that the version of the buffer does not change."""

    def next_factor(self, x):
        return float(self.count.data.add_(1))


class ExchangesBuffer(CountsInBuffer):
    def next_factor(self, x):
        self.count = self.count + 1
        return float(self.count)


STATEFUL_LAYERS = [
    AppendsToList, AppendsToFullDeque, AppendsToNestedContainer, CountsInListedTensor,
    DecaysTensorWithGraph, CountsCalls, TogglesTensorAndNone, DeletesAttribute,
    MakesAttributeWhenCalled, CountsInArray,
    DrawsFromTorch, DrawsFromListedGenerator, DrawsFromNumPy, DrawsFromRandomState,
    DrawsFromPython, DrawsFromProcess, DecaysFrozenCodebook, DecaysTrainedCodebook,
    FreezesItselfAtTimes, ExchangesData, GrowsParameter, MakesParameterWhenCalled,
    MakesModuleWhenCalled, MakesBufferWhenCalled, PlacesHookOnce, HidesModuleInList,
    HoldsScriptedModule, CountsInBuffer, CountsInBufferUnseen, ExchangesBuffer,
]  # fmt: skip


class DecaysLargeParameter(StatefulLayer):
    """Writes into a parameter that is too large to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.ones(2**21 + 1), requires_grad=False)

    def next_factor(self, x):
        return self.state.mul_(0.9)[0].item()


class ExchangesLargeData(DecaysLargeParameter):
    def next_factor(self, x):
        self.state.data = self.state.data * 0.9
        return self.state[0].item()


class MixesByNormalizedWeight(StatefulLayer):
    """Has a weight that is computed at each access unless it is cached."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(32, 32))

    def next_factor(self, x):
        return self.linear(x)


class Decoder(PlainDecoder):
    """A decoder whose compiled call costs the compiler nothing."""

    @torch.compiler.disable
    def forward(self, ids):
        return super().forward(ids)


def decoder_with(layer: type[StatefulLayer]) -> Decoder:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Decoder(layers=1)
    model.blocks[0].mlp.append(layer())
    return model


# -- extra passes during training -----------------------------------------------------------------


def no_look(step):
    return nullcontext()


def train(model, look=no_look, *, around=nullcontext) -> list[float]:
    """Train for three steps, each under `look(step)`; returns losses and the outputs afterwards."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(3):
        with around(), look(step):
            loss = model(batch(2, 8)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses + model(batch(2, 8)).flatten().tolist()


def watched_by_probe(model):
    """Look at each step by a probe, an extra pass on other tokens."""
    return monitored(model, probe=batch(2, 8, seed=1))


def watched_by_twin(model):
    """Look at each step by the eager twin of a compiled model."""
    torch.compiler.reset()
    model.compile(backend="eager")
    return monitored(model)


def monitored(model, **options):
    metrics = {"rows": lambda hidden: float(len(hidden))}
    monitor, _ = watching(model, metrics=metrics, tokens=16, strict=False, **options)
    return monitor


def passes_without_protection(model):
    """Run the model once more before each step, and put nothing back."""

    def look(step):
        with torch.no_grad():
            model(batch(2, 8, seed=1))
        return nullcontext()

    return look


WATCHING = [watched_by_probe, watched_by_twin]


@functools.cache
def unwatched_losses(layer):
    return train(decoder_with(layer))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("watch", WATCHING)
@pytest.mark.parametrize("layer", STATEFUL_LAYERS)
def test_a_model_with_a_state_trains_as_if_no_extra_pass_were_made(layer, watch):
    model = decoder_with(layer)
    assert train(model, watch(model)) == unwatched_losses(layer)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("layer", STATEFUL_LAYERS)
def test_an_unprotected_pass_would_change_the_training(layer):
    """Otherwise the test above would notice nothing."""
    model = decoder_with(layer)
    assert train(model, passes_without_protection(model)) != unwatched_losses(layer)


@pytest.mark.parametrize("watch", WATCHING)
def test_weights_cached_by_parametrize_are_not_left_by_an_extra_pass(watch):
    plain = train(decoder_with(MixesByNormalizedWeight), around=parametrize.cached)
    model = decoder_with(MixesByNormalizedWeight)
    assert train(model, watch(model), around=parametrize.cached) == plain


def switches() -> list[bool]:
    return [torch.is_grad_enabled(), torch.is_autocast_cache_enabled()]


@pytest.mark.parametrize("before", [True, False])
def test_switches_of_torch_are_off_in_an_extra_pass_and_then_as_before(before):
    """Weights that autocast caches without gradients would have none in training."""
    found = []
    with torch.autocast("cpu", cache_enabled=before), torch.set_grad_enabled(before):
        extra_pass(nn.Linear(1, 1), lambda model: found.append(switches()), nullcontext())
        found.append(switches())
    assert found == [[False, False], [before, before]]


@pytest.mark.parametrize("fails", [False, True])
def test_extra_passes_are_counted_as_they_begin(fails):
    before = extra_passes()

    def run(model):
        assert extra_passes() == before + 1
        if fails:
            raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        extra_pass(nn.Linear(1, 1), run, nullcontext())
    assert extra_passes() == before + 1


def test_random_states_are_kept_around_a_body():
    model, drawn = nn.Linear(1, 1), []
    for _ in range(2):
        with suppress(ZeroDivisionError), random_states_kept(model):
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
            raise ZeroDivisionError
    assert drawn[0] == drawn[1]


# -- limits of what is put back -------------------------------------------------------------------


class Passes(NamedTuple):
    """Extra passes that were tried: how many were made, and why the others were refused."""

    made: int
    refusals: set[str]


ALL_MADE = Passes(3, set())


def run_once(model):
    model(batch(2, 8))


def try_passes(model, action=run_once, times=3) -> Passes:
    """Try extra passes; the model does something in each."""
    made, refusals = 0, set()

    def counted(model):
        nonlocal made
        made += 1
        action(model)

    for _ in range(times):
        try:
            extra_pass(model, counted, nullcontext())
        except ValueError as error:
            refusals.add(str(error))
    return Passes(made, refusals)


def holding(**held: Any) -> nn.Module:
    """A model that only holds something."""
    return Running(len, **held)


def test_a_pass_that_writes_into_a_parameter_too_large_to_copy_is_the_last_one(caplog):
    model, name = decoder_with(DecaysLargeParameter), "blocks.0.mlp.3.state"
    passes = try_passes(model)
    assert passes.made == 1
    (refusal,) = passes.refusals
    assert name in refusal
    assert [name in record.getMessage() for record in caplog.records] == [True]
    assert try_passes(nn.Sequential(model)).made == 0  # wherever the parameter is
    assert try_passes(decoder_with(AppendsToList)) == ALL_MADE  # another model
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("parameters", "listed", "named"),
    [(1, 0, "states.0"), (4, 0, "states.0, states.1, states.2"), (0, 1, "a tensor in a container")],
)
def test_what_a_pass_has_changed_for_good_is_named_in_one_line(parameters, listed, named, caplog):
    def large():
        return nn.Parameter(torch.ones(2**21 + 1))

    model = holding(
        states=nn.ParameterList(large() for _ in range(parameters)),
        held=[large() * 1 for _ in range(listed)],
        fine=nn.Parameter(torch.ones(1)),
    )

    def decay(model):
        for each in (*model.states, *model.held):
            each.mul_(0.9)

    assert try_passes(model, decay) == Passes(1, {
        f"an earlier extra pass changed {named.split(', ')[0]}, because the forward pass writes "
        "into it: no further extra pass is made"
    })  # fmt: skip
    assert caplog.messages == [
        f"the forward pass of Running writes into {named}: an extra pass has changed it for good, "
        "because it was too large to copy, and no further extra pass will be made"
    ]


@pytest.mark.parametrize("watch", WATCHING)
def test_training_goes_on_if_no_extra_pass_can_be_made(watch, caplog, failures):
    once = decoder_with(DecaysLargeParameter)
    try_passes(once, times=1)
    model = decoder_with(DecaysLargeParameter)
    assert train(model, watch(model)) == train(once)
    said = [record.getMessage() for record in caplog.records]
    assert sum("writes into blocks.0.mlp.3.state" in words for words in said) == 2
    failures.clear()


def test_a_parameter_shared_by_modules_is_copied_once():
    shared = nn.Parameter(torch.ones(5 * 2**18), requires_grad=False)  # 5 MiB of the 8 MiB
    model = nn.Sequential(holding(state=shared), holding(state=shared))

    def decay(model):
        for module in model:
            module.state.mul_(0.9)

    assert try_passes(model, decay) == ALL_MADE
    assert shared.mean() == 1


def test_the_data_of_a_large_parameter_are_put_back_if_others_took_their_place():
    model = decoder_with(ExchangesLargeData)
    parameter = model.blocks[0].mlp[-1].state
    address = parameter.data_ptr()
    assert try_passes(model) == ALL_MADE
    assert parameter.data_ptr() == address
    assert parameter[0] == 1


def test_data_that_another_library_gathers_stay():
    """DeepSpeed leaves a parameter empty until a pass needs it."""
    model = holding(state=nn.Parameter(torch.empty(0)))

    def gather(model):
        model.state.data = torch.ones(3, 3)

    assert try_passes(model, gather) == ALL_MADE
    assert model.state.numel() == 9


def test_the_sign_of_a_zero_is_put_back():
    model = holding(state=nn.Buffer(torch.zeros(3)))
    assert try_passes(model, lambda model: model.state.neg_()) == ALL_MADE
    assert not model.state.signbit().any()


@pytest.mark.parametrize(("numbers", "is_put_back"), [(2**17, True), (2**17 + 1, False)])
def test_an_array_is_put_back_up_to_one_mebibyte(numbers, is_put_back):
    model = holding(state=np.zeros(numbers))
    assert try_passes(model, lambda model: model.state.fill(1)) == ALL_MADE
    assert (model.state == 0).all() == is_put_back


def test_an_array_that_cannot_be_written_needs_no_copy():
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    assert try_passes(holding(state=fixed), lambda model: None) == ALL_MADE


MEBIBYTE = 2**18  # numbers of 4 bytes


def parameters_put_back(*parameters: nn.Parameter) -> list[bool]:
    """Tell which of a model's parameters, all ones, a pass that writes into all leaves at 1."""

    def decay(model):
        for parameter in model:
            parameter.mul_(0.9)

    try_passes(nn.ParameterList(parameters), decay, times=1)
    return [parameter[0].item() == 1 for parameter in parameters]


def trained(numbers: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(numbers))


def frozen(numbers: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(numbers), requires_grad=False)


def test_parameters_of_eight_mebibytes_are_copied():
    assert parameters_put_back(frozen(8 * MEBIBYTE)) == [True]


def test_frozen_parameters_are_copied_before_trained_ones():
    assert parameters_put_back(trained(8 * MEBIBYTE), frozen(1)) == [False, True]
    assert parameters_put_back(trained(1), frozen(8 * MEBIBYTE)) == [False, True]


def test_small_parameters_are_copied_before_large_ones():
    assert parameters_put_back(trained(4 * MEBIBYTE + 1), trained(4 * MEBIBYTE)) == [False, True]


TENSORS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "float8": lambda: torch.zeros(3).to(torch.float8_e4m3fn),
    "meta": lambda: torch.ones(3, device="meta"),
    "expanded": lambda: torch.ones(1).expand(3),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "inference": lambda: torch.inference_mode()(torch.ones)(3),
    "NaN": lambda: torch.full((3,), torch.nan),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", TENSORS)
def test_a_model_may_hold_tensors_of_any_kind(kind):
    model = holding(buffer=nn.Buffer(TENSORS[kind]()), listed=[TENSORS[kind]()])
    if kind == "meta":  # a device without random numbers
        model.weight = nn.Parameter(TENSORS[kind]())
    assert try_passes(model, lambda model: None) == ALL_MADE


def test_containers_stay_the_same_objects_and_get_their_former_contents():
    def contents():
        return [[1], {"a": {2}}, deque([3], maxlen=4), OrderedDict(b=4), defaultdict(list, c=[5])]

    held = contents()
    model, inner = holding(state=held), [*held]

    def clear_all(model):
        for container in (*held, held[1]["a"]):
            container.clear()
        held.append(6)
        model.state = None

    assert try_passes(model, clear_all) == ALL_MADE
    assert model.state is held
    assert all(one is other for one, other in zip(held, inner, strict=True))
    assert repr(held) == repr(contents())


@pytest.mark.parametrize(
    ("depth", "items", "is_put_back"),
    [(4, 1, True), (5, 1, False), (1, 1000, True), (1, 1001, False)],
)
def test_containers_are_put_back_four_deep_and_with_up_to_a_thousand_items(
    depth, items, is_put_back
):
    innermost: list[int] = []
    model = holding(state=innermost)
    for _ in range(depth):
        model.state = [model.state for _ in range(items)]
    assert try_passes(model, lambda model: innermost.append(1), times=1) == Passes(1, set())
    assert (innermost == []) == is_put_back


def test_an_error_while_putting_something_back_is_raised_after_the_rest_was_put_back():
    model = holding(before=[], array=np.zeros(3), behind=[])

    def change(model):
        model.before.append(1)
        model.behind.append(1)
        model.array.flags.writeable = False

    with pytest.raises(ValueError, match="read-only"):
        extra_pass(model, change, nullcontext())
    assert model.before == model.behind == []


def test_objects_of_unknown_classes_are_not_looked_into():
    class Records:
        def __iter__(self):
            raise AssertionError("looked into")

        __len__ = __getattr__ = __eq__ = __iter__
        __hash__ = object.__hash__

    model = holding(records=Records())
    vars(model)["lost"] = weakref.proxy(set())  # whose object is gone
    assert try_passes(model, lambda model: None) == ALL_MADE


# -- names of torch that a release may take away --------------------------------------------------


def test_without_torchs_cache_of_parametrised_weights_only_models_with_some_are_refused(
    monkeypatch,
):
    monkeypatch.delattr(parametrize, "_cache")
    assert try_passes(decoder_with(AppendsToList)) == ALL_MADE
    passes = try_passes(decoder_with(MixesByNormalizedWeight))
    assert passes.made == 0
    assert "parametrised weights" in passes.refusals.pop()


@pytest.fixture
def fsdp(monkeypatch):
    """A double of `torch.distributed.fsdp`; tests on several ranks use the real one."""

    class FSDPModule(nn.Module):
        reshards = 0

        def reshard(self) -> None:
            type(self).reshards += 1

    class FullyShardedDataParallel(nn.Module): ...

    found = types.ModuleType("torch.distributed.fsdp")
    found.FSDPModule, found.FullyShardedDataParallel = FSDPModule, FullyShardedDataParallel
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", found)
    return found


@pytest.mark.parametrize("raises", [False, True])
def test_parameters_that_fsdp_gathered_are_sharded_again(raises, fsdp):
    model = nn.Sequential(fsdp.FSDPModule(), nn.Linear(2, 2))

    def run(model):
        if raises:
            raise RuntimeError

    with suppress(RuntimeError):
        extra_pass(model, run, nullcontext())
    assert fsdp.FSDPModule.reshards > 0


@pytest.mark.parametrize(
    "name",
    ["_handle", "uses_sharded_strategy", "needs_unshard", "reshard", "post_reshard", "_prefetched"],
)
def test_modules_of_fsdp1_are_refused_if_torch_lacks_a_name_that_sharding_again_needs(name, fsdp):
    model = fsdp.FullyShardedDataParallel()
    model._handle = types.SimpleNamespace(
        uses_sharded_strategy=True, needs_unshard=lambda: False, reshard=lambda free: None,
        post_reshard=lambda: None, _prefetched=True,
    )  # fmt: skip
    assert try_passes(model, lambda model: None) == ALL_MADE
    delattr(model if name == "_handle" else model._handle, name)
    passes = try_passes(model, lambda model: None)
    assert passes.made == 0
    assert "could not be sharded again" in passes.refusals.pop()


@pytest.mark.parametrize(
    ("shards", "gathered", "calls"),
    [(True, True, ["reshard True", "post_reshard"]), (True, False, []), (False, True, [])],
)
def test_what_fsdp1_gathered_is_freed_and_marked_as_not_fetched(shards, gathered, calls, fsdp):
    model, made = fsdp.FullyShardedDataParallel(), []
    inner = fsdp.FullyShardedDataParallel()
    inner._handle = None  # a module without parameters
    handle = types.SimpleNamespace(
        uses_sharded_strategy=shards, needs_unshard=lambda: not gathered, _prefetched=True,
        reshard=lambda free: made.append(f"reshard {free}"),
        post_reshard=lambda: made.append("post_reshard"),
    )  # fmt: skip
    model._handle, model.inner = handle, inner
    assert try_passes(model, lambda model: None, times=1) == Passes(1, set())
    assert made == calls
    assert handle._prefetched is not bool(calls)


def test_modules_of_fsdp1_get_their_flags_and_buffers_back_alone(fsdp):
    """Their parameters are exchanged as they are gathered."""
    model = fsdp.FullyShardedDataParallel()
    model._handle, model.listed, model.count = None, [], nn.Buffer(torch.zeros(2))
    model.inner = nn.Linear(1, 1)

    def change(model):
        model.eval()
        model.count += 1
        model.listed.append(1)

    assert try_passes(model, change, times=1) == Passes(1, set())
    assert model.training
    assert model.inner.training
    assert model.count.tolist() == [0, 0]
    assert model.listed == [1]


# -- users are told that extra passes are made -----------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def fail_without_gradients(module, args):
    if not torch.is_grad_enabled():
        raise ValueError("the model is only trained")


class Look(NamedTuple):
    """A way to look at a training: options of the monitor, and whether it takes extra passes."""

    options: dict[str, Any]
    takes_extra_passes: bool
    compiles_blocks: bool = False


LOOKS = {
    "probe": lambda: Look({"probe": batch()}, takes_extra_passes=True),
    "probe of batches": lambda: Look({"probe": iter([batch(), batch()])}, takes_extra_passes=True),
    "compiled": lambda: Look({}, takes_extra_passes=True, compiles_blocks=True),
    "compiled, at a check": lambda: Look(
        {"schedule": lambda step: step == 2, "checks": every(1)},
        takes_extra_passes=True,
        compiles_blocks=True,
    ),
    "the training's own pass": lambda: Look({}, takes_extra_passes=False),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", LOOKS)
def test_extra_passes_are_announced_once_in_the_log_and_in_the_record_even_if_they_fail(
    name, fails, caplog, fresh_compiler, failures
):
    look, calls, model = LOOKS[name](), [], PlainDecoder()
    model.register_forward_pre_hook(lambda *given: calls.append(1))
    if fails:
        model.blocks[1].register_forward_pre_hook(fail_without_gradients)
    monitor, memory = watching(model, strict=False, **look.options)
    for step in range(3):  # the first is read in any case
        if look.compiles_blocks and step == 1:
            for block in model.blocks:
                block.compile(backend="eager")
        if step == 2:  # from here on nothing fails
            said = [text for text in caplog.messages if "an extra pass of the model" in text]
            assert len(said) == look.takes_extra_passes
            model.blocks[1]._forward_pre_hooks.clear()
        with monitor(step):
            model(batch())
    monitor.close()
    failures.clear()
    assert (len(calls) > 3) == look.takes_extra_passes
    notes = [note.kind for reading in memory.readings for note in reading.notes]
    assert notes.count("extra pass") == look.takes_extra_passes
