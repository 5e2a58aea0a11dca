"""Models that are compiled whole, in place and per block, and mixed precision."""

import functools
import operator
import warnings
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers.integrations import flex_attention

from geomon import Memory, every, select
from support import measuring
from support.models import Running
from support.specimens import VOCABULARY, built
from support.watched import blocks_of
from support.zoo import ZOO

METRICS = select("variance", "anisotropy", "attention_entropy", "qk_cosine")
IDS = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
STEPS, NORM = 4, ("final_norm",)


class Counting:
    """A backend that counts graphs and their runs; as inductor does, it draws other numbers."""

    def __init__(self, *, draws: bool = False) -> None:
        self.graphs = self.runs = 0
        self.draws = draws

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*given):
            self.runs += 1
            if self.draws:
                torch.rand(1)
            return graph.forward(*given)

        return run


# Tracing warns so about a block's inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def made(name: str = "nanoGPT-like", dropout: float = 0.0) -> nn.Module:
    return built(ZOO[name], "sdpa", dropout=dropout).train()


def logits_of(model: nn.Module) -> torch.Tensor:
    output = model(IDS)
    return output if isinstance(output, torch.Tensor) else output[0]


def train(model, monitor=None):
    """Weights, losses and random state after a few steps; the window is open over both passes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    losses = []
    for step in range(STEPS):
        with monitor(step) if monitor else torch.enable_grad():
            logits = logits_of(model)
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values(), torch.tensor(losses), torch.get_rng_state()]


def same(one, other) -> bool:
    """Whether two trainings are bit-identical."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def watching(model, schedule=None, **options):
    """A monitor and what it writes to."""
    few = {"metrics": METRICS, "schedule": schedule or every(2), "splits": 2}
    return measuring.watching(model, **few, **options)


def values_of(memory: Memory) -> list[tuple[int, dict[str, float | None]]]:
    return [
        (x.step, {tag: v for tag, v in x.values.items() if not tag.startswith("geomon/")})
        for x in memory.readings
    ]


@functools.cache
def plain_readings(name="nanoGPT-like", dropout=0.0, extra=()):
    """Readings of the model trained as it is."""
    model = made(name, dropout)
    monitor, memory = watching(model, extra_layers=extra)
    train(model, monitor)
    return values_of(memory)


# Modules that are compiled where they are.
IN_PLACE = {
    "in place": lambda model: [model],
    "per block": lambda model: model.transformer.h,
    "one projection": lambda model: [block.attn for block in model.transformer.h],
    "one function": lambda model: [],
    "the function of its class": lambda model: [],
}


def compiled(way, model, backend):
    if way == "whole":
        return torch.compile(model, backend=backend)
    if way == "one function":  # which hides the modules that it calls
        model.forward = torch.compile(model.forward, backend=backend)
    if way == "the function of its class":
        forward = torch.compile(type(model).forward, backend=backend)
        model.__class__ = type("Compiled", (type(model),), {"forward": forward})
    for module in IN_PLACE[way](model):
        module.compile(backend=backend)
    return model


@pytest.mark.parametrize(
    ("name", "way", "compiled_first"),
    [
        ("nanoGPT-like", "whole", False),
        ("nanoGPT-like", "in place", True),
        ("nanoGPT-like", "per block", False),
        ("GPT-2", "whole", True),
        ("GPT-2", "per block", True),
    ],
)
def test_monitoring_compiles_nothing_again(name, way, compiled_first):
    counts, trainings = [], []
    for monitored in (False, True):
        torch.compiler.reset()
        backend = Counting()
        model = compiled(way, made(name), backend)
        if compiled_first:
            logits_of(model).sum().backward()
            model.zero_grad()
        monitor, memory = watching(model, extra_layers=NORM) if monitored else (None, None)
        trainings.append(train(model, monitor))
        counts.append(backend.graphs)
        with torch.compiler.set_stance("fail_on_recompile"):
            logits_of(model)
            with monitor(99, force=True) if monitor else torch.enable_grad():
                logits_of(model)
            logits_of(model)
    assert counts[0] == counts[1] > 0
    assert same(*trainings)
    assert not [n for x in memory.readings for n in x.words() if "the block before" in n]
    readings, expected = values_of(memory), plain_readings(name, extra=NORM)
    assert [step for step, _ in readings] == [0, 2, 99]
    assert any("final_norm" in tag for tag in expected[0][1])
    for (_, found), (_, plain) in zip(readings, expected, strict=False):
        assert found.keys() == plain.keys()
        assert found == pytest.approx(plain, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("way", ["whole", "in place", "per block"])
def test_compiled_models_give_the_same_readings_by_probe(way):
    backend = Counting()
    model = compiled(way, made(), backend)
    train(model)
    graphs = backend.graphs
    monitor, memory = watching(model, probe=IDS)
    monitor.probe(7)
    assert backend.graphs == graphs
    plain = made()
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    bare, expected = watching(plain, probe=IDS)
    bare.probe(7)
    assert values_of(memory) == values_of(expected)


@pytest.mark.parametrize("of_class", [False, True])
def test_a_compiled_forward_around_what_runs_the_blocks_is_looked_into(of_class):
    kind, backend = type("Around", (Running,), {}), Counting(draws=True)
    model = kind(lambda m, ids: m.inner(ids), inner=made(dropout=0.3)).train()
    if of_class:
        kind.forward = torch.compile(Running.forward, backend=backend)
    else:
        model.forward = torch.compile(model.forward, backend=backend)
    monitor, memory = watching(model)
    torch.manual_seed(3)
    with monitor(0):
        model(IDS)
    assert backend.runs == 1
    assert values_of(memory)[0] == plain_readings(dropout=0.3)[0]
    assert not any("ran eagerly" in note for note in memory.readings[0].words())


def test_a_compiled_loss_beside_the_model_is_run_as_compiled(caplog):
    backend = Counting()
    loss_of = torch.compile(lambda logits: logits.square().mean(), backend=backend)
    model = made()
    monitor, memory = watching(model)
    for step in range(3):
        with monitor(step):
            loss_of(logits_of(model)).backward()
    assert (backend.graphs, backend.runs) == (1, 3)
    assert memory.readings
    assert not [r for r in caplog.records if "ran eagerly" in r.getMessage()]


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        *((way, Counting(draws=True)) for way in ("whole", *IN_PLACE)),
        ("per block", "aot_eager"),
    ],
)
def test_a_compiled_training_with_dropout_is_bit_identical(way, backend):
    trainings = []
    for monitored in (False, True):
        torch.compiler.reset()
        model = compiled(way, made(dropout=0.3), backend)
        monitor, memory = watching(model) if monitored else (None, None)
        trainings.append(train(model, monitor))
    assert same(*trainings)
    readings = values_of(memory)
    assert [step for step, _ in readings] == [0, 2]
    # The twin of the first step sees what an eager step would have seen.
    ((_, plain), *_), first = plain_readings(dropout=0.3), readings[0][1]
    assert first == plain


def test_a_compiled_call_writes_into_its_buffers_once():
    """A cache of keys that is passed along, and a count in the model."""

    def caching(m, ids, cache, settings):
        m.count += 1
        hidden = m.inner(ids)
        cache.append(hidden)
        settings["calls"] += 1
        return hidden

    model = Running(caching, inner=made(), count=nn.Buffer(torch.zeros(())))
    model.compile(backend="eager")
    monitor, memory = watching(model)
    cache, settings = [], {"calls": 0}
    with monitor(0):
        model(IDS, cache, settings)
    assert (len(cache), settings["calls"], model.count.item()) == (1, 1, 1)
    assert len(memory.readings) == 1


def test_the_twin_of_a_compiled_call_gets_copies_of_tensors_and_all_else_itself():
    """Each in its place: a twin that writes into a tensor must not change the training's."""

    def run(m, ids, shift, *, scale, project, change):
        kept.append((ids, shift, scale, project, change))
        shift.add_(1)
        return project(change(m.inner(ids)[0] * scale) + shift)

    kept, model = [], Running(run, inner=made())
    ids, shift, scale = IDS.clone(), torch.ones(VOCABULARY), torch.tensor(3.0)
    project, change = nn.Linear(VOCABULARY, 2), lambda x: x * 2
    given = {"scale": scale, "project": project, "change": change}
    expected = model(ids, shift.clone(), **given)
    model.compile(backend="eager")
    monitor, memory = watching(model)
    with monitor(0):
        found = model(ids, shift, **given)
    torch.testing.assert_close(found, expected)
    assert len(memory.readings) == 1
    assert torch.equal(shift, torch.full((VOCABULARY,), 2.0))
    _, twin, training = kept
    assert all(map(operator.is_, training, (ids, shift, *given.values())))
    assert torch.equal(twin[0], ids)
    assert torch.equal(twin[1], shift)  # it was one less, and a copy has been written into
    assert twin[2].item() == 3
    assert not {x.data_ptr() for x in twin[:3]} & {x.data_ptr() for x in (ids, shift, scale)}
    assert twin[3] is project
    assert twin[4] is change


def test_a_twin_warns_of_nothing():
    """The training itself does not run eagerly what it compiles."""

    def warns(m, ids):
        if not torch.compiler.is_compiling():
            warnings.warn("run eagerly", stacklevel=1)
        return m.inner(ids)

    model = Running(warns, inner=made())
    with pytest.warns(UserWarning, match="run eagerly"):
        model(IDS)
    model.compile(backend="eager")
    monitor, memory = watching(model)
    with monitor(0):
        model(IDS)
    assert len(memory.readings) == 1


def test_a_twin_that_fails_is_said_by_each_monitor_and_ends_nothing(failures):
    def fails(m, ids):
        logits = m.inner(ids)
        if not torch.compiler.is_compiling():
            raise ValueError("is not compiled")
        return logits

    model = Running(fails, inner=made())
    model.compile(backend="eager")
    watched = [watching(model, strict=False) for _ in range(2)]
    with ExitStack() as stack:
        for monitor, _ in watched:
            stack.enter_context(monitor(0))
        logits = model(IDS)
    assert torch.equal(logits[0], model.inner(IDS)[0])
    for _, memory in watched:
        assert any("is not compiled" in note for note in memory.readings[0].words())
    failures.clear()


def test_a_twin_that_fails_before_its_blocks_is_why_nothing_was_seen(failures, caplog):
    def fails(m, ids):
        if not torch.compiler.is_compiling():
            raise ValueError("is not compiled")
        return m.inner(ids)

    model = Running(fails, inner=made())
    model.compile(backend="eager")
    monitor, memory = watching(model, strict=False)
    for step in range(2):
        with monitor(step):
            model(IDS)
    assert not memory.readings
    (said,) = {message for message in caplog.messages if "left out" in message}
    assert "missing: ValueError: is not compiled; hidden states at inner." in said
    failures.clear()


def test_the_twin_of_a_compiled_wrapper_is_of_what_is_inside(caplog):
    """A second call of `DistributedDataParallel` would wait for other ranks."""
    calls = []
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(made())
        wrapper.register_forward_pre_hook(lambda *given: calls.append(1))
        model = torch.compile(wrapper, backend="eager")
        monitor, memory = watching(model)
        with monitor(0):
            logits_of(model).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert (len(memory.readings), len(calls)) == (1, 1)
    assert "ran eagerly" not in caplog.text


@pytest.mark.parametrize("way", ["", "fsdp", "sharded", "lazy", "sync"])
def test_a_compiled_call_is_made_once_more_where_that_can_be_done(way):
    """Not where ranks exchange something in it, or where it would draw its parameters."""

    def counted(m, ids):
        calls.append(1)
        return m.inner(ids)

    modules = {"lazy": nn.LazyLinear(3), "sync": nn.SyncBatchNorm(3), "sharded": nn.Linear(3, 3)}
    calls, beside = [], modules.get(way)
    if way == "sharded":  # as a DTensor has it
        beside.weight.to_local = lambda: None
    model = Running(counted, inner=made(), beside=beside)
    if way == "fsdp":  # as FSDP1 marks what it holds
        model.inner._is_fsdp_managed_module = True
    model.compile(backend="eager")
    # A window that is to see the final norm is not closed early.
    monitor, memory = watching(model, extra_layers=["final_norm"])
    with monitor(0):
        model(IDS).sum().backward()
        assert len(calls) == (1 if way else 2)
        model(IDS)  # after the pass that counts
    assert len(calls) == (2 if way else 3)
    assert len(memory.readings) == 1
    assert any("ran eagerly" in note for note in memory.readings[0].words()) == bool(way)


@pytest.mark.parametrize("why", ["forward is another's", "arguments cannot be copied", ""])
def test_compiled_blocks_are_looked_at_if_the_call_around_them_cannot_be_made_twice(why):
    """Lightning runs a training step, which logs and optimizes, inside a call of the module."""
    model, calls, given = compiled("per block", made(dropout=0.3), Counting(draws=True)), [], (IDS,)
    forward = type(model).forward

    def counted(self, ids, *others):
        calls.append(1)
        return forward(self, ids)

    if why == "forward is another's":
        model.forward = functools.partial(counted, model)
    else:
        model.__class__ = type("Counted", (type(model),), {"forward": counted})
    if why == "arguments cannot be copied":
        given = IDS, (number for number in range(3))
    torch.manual_seed(0)
    alone = model(*given)
    monitor, memory = watching(model)
    torch.manual_seed(0)
    with monitor(0):
        watched = model(*given)
    assert torch.equal(watched[0], alone[0])
    assert len(calls) == (2 if why else 3)
    (reading,) = memory.readings
    assert not any("ran eagerly" in note for note in reading.words())
    assert reading.values["attention_entropy/layer_01"] > 0


def test_a_function_that_is_compiled_in_blocks_runs_eagerly_if_the_call_cannot_be_made_twice():
    """No call inside is left that would show what it hides."""
    backend = Counting()
    attend = torch.compile(scaled_dot_product_attention, backend=backend)
    blocks = [Running(lambda m, x, keep: m.inner(x), inner=each) for each in blocks_of(attend)]

    def run(m, x, keep):
        for block in m.blocks:
            x = block(x, keep)
        return x

    model = Running(run, blocks=nn.ModuleList(blocks))
    hidden = torch.randn(3, 6, 32)
    model(hidden, None)
    runs = backend.runs
    monitor, memory = watching(model)
    with monitor(0):
        model(hidden, (number for number in range(3)))
    assert backend.runs == runs > 0
    (reading,) = memory.readings
    assert any("ran eagerly" in note for note in reading.words())
    assert reading.values["attention_entropy/layer_02"] > 0


def test_a_step_that_has_to_run_eagerly_is_said_once(caplog):
    model = made()
    model.compile(backend="eager")
    forward = model.forward
    model.forward = lambda ids, keep: forward(ids)
    step = functools.partial(model, keep=(i for i in range(3)))  # it cannot be copied
    monitor, memory = watching(model, every(1))
    for number in range(3):
        with monitor(number):
            step(IDS)
    assert [reading.step for reading in memory.readings] == [0, 1, 2]
    said = [r for r in caplog.records if "ran eagerly while it was watched" in r.getMessage()]
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
def test_flex_attention_that_transformers_compiles_runs_compiled_and_is_seen(monkeypatch):
    """It compiles flex attention and what makes its masks, not the model around them."""
    backend = Counting()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(flex_attention.WrappedFlexAttention, "_instance", None)
    model = built(ZOO["Qwen3"], "sdpa")
    model.config._attn_implementation = "flex_attention"
    readings = []
    with torch.no_grad():
        alone, graphs = logits_of(model), backend.graphs
        for each in (model, built(ZOO["Qwen3"], "eager")):
            monitor, memory = watching(each)
            with monitor(0):
                found = logits_of(each)
            assert each is not model or torch.equal(found, alone)
            readings += memory.readings
    assert backend.graphs == graphs > 0
    assert not any("ran eagerly" in note for note in readings[0].words())
    tags = [tag for tag in readings[1].values if tag.startswith(("attention_entropy", "qk_cosine"))]
    assert tags
    assert {tag: readings[0].values.get(tag) for tag in tags} == pytest.approx(
        {tag: readings[1].values[tag] for tag in tags}, rel=1e-4, abs=1e-5, nan_ok=True
    )


def test_mixed_precision_is_left_alone_and_complete():
    model = made(dropout=0.2)
    monitor, memory = watching(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(train(model, monitor), train(made(dropout=0.2)))
    found, plain = values_of(memory), plain_readings(dropout=0.2)
    assert [step for step, _ in found] == [0, 2]
    assert found[0][1].keys() == plain[0][1].keys()
    # The same weights and dropout at step 0: what differs is the rounding of bfloat16.
    assert found[0][1] == pytest.approx(plain[0][1], rel=0.05, abs=0.02, nan_ok=True)
    assert found[0][1] != plain[0][1]
