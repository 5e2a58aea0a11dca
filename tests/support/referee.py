"""The referee: what a model computes, seen without geomon, against what geomon captured.

Hidden states and projections are the outputs of plain hooks on the watched model itself, in a run
of its own. Attention probabilities are what the same model gives when it attends eagerly.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geomon.capture import Plans, Window, find_anatomy
from geomon.capture.assemble import side_stack_name
from geomon.capture.first_pass import attention_key
from geomon.capture.snapshot import CAPTURED, Layer, Snapshot, source_of
from geomon.capture.tokens.known_tokens import KnownTokens
from geomon.capture.tokens.sampling import SampledRows
from support.specimens import Specimen, Stack, as_turned, built, inputs_of

Place = tuple[str, int]  # stack and depth; depth 0 is what enters the first block


# -- what the model computes -------------------------------------------------------------------


@dataclass
class Reference:
    """Tensors of one forward pass of a model, by stack and depth."""

    hidden: dict[Place, Tensor] = field(default_factory=dict)  # of the blocks, by hooks
    query: dict[Place, Tensor] = field(default_factory=dict)  # [..., heads, head width]
    key: dict[Place, Tensor] = field(default_factory=dict)
    attention: dict[Place, Tensor] = field(default_factory=dict)  # [sequences, heads, .., keys]


@torch.no_grad()
def refer(specimen: Specimen, implementation: str, *, padded: bool = True) -> Reference:
    """Run a specimen under plain hooks; its eager twin gives the attention probabilities."""
    model = built(specimen, implementation)
    inputs = inputs_of(specimen, padded=padded)
    reference = Reference()
    with without_fast_path(), _hooks() as hold:
        for name, stack in specimen.stacks.items():
            _watch(model, name, stack, reference, hold)
        model(**inputs)
    own = specimen.own_attention.get(implementation)
    if own is None:
        _attend(specimen, inputs, reference)
    else:
        for place, query in reference.query.items():
            reference.attention[place] = own(query, reference.key[place], inputs)
    return reference


def _watch(
    model: nn.Module, name: str, stack: Stack, reference: Reference, hold: Callable[[Any], None]
) -> None:
    """Hooks that keep what one stack computes; the order of the calls is the depth."""
    blocks = stack.blocks_in(model)
    if not name.endswith("cross"):
        hold(blocks[0].register_forward_pre_hook(_entering(reference, name), with_kwargs=True))
        leaves = _keep(reference.hidden, name)
        for block in blocks:
            hold(block.register_forward_hook(lambda _, __, output: leaves(_states(output))))
    keeps = {
        which: _keep(getattr(reference, which), name, stack.attending) for which in ("query", "key")
    }
    for block in stack.attending_in(model).values():
        for path, made in _projections(block, stack).items():

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, made=made) -> None:
                for which, values in made(module, [*args, *kwargs.values()], output).items():
                    keeps[which](values)

            hold(block.get_submodule(path).register_forward_hook(hook, with_kwargs=True))


# From a module, what it was given and its output to queries and keys, as far as it makes them.
Made = Callable[[nn.Module, list[Any], Any], Mapping[str, Tensor]]


def _projections(block: nn.Module, stack: Stack) -> dict[str, Made]:
    """List the modules of a block that make queries and keys, by path, with how to read them."""
    if stack.holder:
        return {stack.holder: _by_weights}
    if not stack.query:
        return {}
    if isinstance(block.get_submodule(stack.query), nn.MultiheadAttention):
        return {stack.query: _multihead}
    if stack.key is None:
        return {stack.query: lambda module, given, output: _both(
            stack.split(output, stack.heads, stack.key_heads)
        )}  # fmt: skip
    found: dict[str, Made] = {
        stack.query: lambda module, given, output: {"query": stack.query_of(output, stack.heads)},
        stack.key: lambda module, given, output: {"key": stack.key_of(output, stack.key_heads)},
    }
    return found if stack.shared is None else found | _latent(stack)


def _both(values: Iterable[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("query", "key"), values, strict=True))


def _latent(stack: Stack) -> dict[str, Made]:
    """Keys of latent attention: of each head its own part, and behind it the one of all heads."""
    shared: list[Tensor] = []

    def first(module: nn.Module, given: list[Any], output: Tensor) -> dict[str, Tensor]:
        shared.append(output)
        return {}

    def then(module: nn.Module, given: list[Any], output: Tensor) -> dict[str, Tensor]:
        common = as_turned(shared.pop()[..., module.in_features :])
        own = output.view(*common.shape[:-1], stack.heads, -1)[..., : stack.own_width]
        common = common.unsqueeze(-2).expand(*own.shape[:-1], -1)
        return {"key": torch.cat([own, common], dim=-1)}

    return {stack.shared: first, stack.key: then}


def _entering(reference: Reference, name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        reference.hidden.setdefault((name, 0), _states([*args, *kwargs.values()]).clone())

    return hook


def _keep(
    kept: dict[Place, Tensor], name: str, depths: Iterable[int] | None = None
) -> Callable[[Tensor], None]:
    place = iter(depths or itertools.count(1))

    def keep(values: Tensor) -> None:
        kept[name, next(place)] = values.clone()

    return keep


def _by_weights(module: nn.Module, given: list[Any], output: Any) -> dict[str, Tensor]:
    """XLNet multiplies with its weights in a function: the same products, and the query's bias."""
    query, key = (torch.einsum("ibh,hnd->ibnd", given[0], own) for own in (module.q, module.k))
    return _both((query + module.r_w_bias, key))


def _multihead(module: nn.Module, given: list[Any], output: Any) -> dict[str, Tensor]:
    """`nn.MultiheadAttention` projects inside a function: the same product of its inputs."""
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    parts = zip(given[:2], weights[:2], biases[:2], strict=True)
    return _both(F.linear(*part).unflatten(-1, (module.num_heads, -1)) for part in parts)


def _attend(specimen: Specimen, inputs: dict[str, Any], reference: Reference) -> None:
    """Attention probabilities of the model that attends eagerly."""
    model = built(specimen, "eager")
    recorded: dict[Place, Tensor] = {}
    with _hooks() as hold:
        for name, stack in specimen.stacks.items():
            if stack.attention and stack.attention.startswith("in "):
                _record(model, name, stack, recorded, hold)
        output = model(**inputs, **_asks_for_attention(specimen))
    reference.attention.update(recorded)
    for name, stack in specimen.stacks.items():
        if stack.attention and not stack.attention.startswith("in "):
            found = _field(output, stack.attention)
            depths = stack.attending or range(1, len(found) + 1)
            for depth, probabilities in zip(depths, found, strict=True):
                reference.attention[name, depth] = probabilities


def _record(
    model: nn.Module, name: str, stack: Stack, recorded: dict[Place, Tensor],
    hold: Callable[[Any], None],
) -> None:  # fmt: skip
    """Hooks on the attention of each block, which holds its probabilities or returns them."""

    def ask(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    def keep(depth: int) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            kept = getattr(module, "probabilities", None)
            recorded[name, depth] = output[1] if kept is None else kept

        return hook

    path = (stack.attention or "").removeprefix("in ")
    for depth, block in stack.attending_in(model).items():
        attention = block.get_submodule(path)
        if isinstance(attention, nn.MultiheadAttention):
            hold(attention.register_forward_pre_hook(ask, with_kwargs=True))
        hold(attention.register_forward_hook(keep(depth)))


def _asks_for_attention(specimen: Specimen) -> dict[str, bool]:
    """Arguments that make a transformers model return its attention."""
    names = [stack.attention or "in none" for stack in specimen.stacks.values()]
    return {} if all(name.startswith("in ") for name in names) else {"output_attentions": True}


def _field(output: Any, path: str) -> tuple[Tensor, ...]:
    return functools.reduce(getattr, path.split("."), output)


def _states(values: Any) -> Tensor:
    """The hidden states among a block's arguments or outputs: the first floating-point tensor."""
    if isinstance(values, Tensor):
        return values
    return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())


@contextmanager
def without_fast_path() -> Iterator[None]:
    """The fused path that plain torch takes in eval mode without gradients rounds differently."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _hooks() -> Iterator[Callable[[Any], None]]:
    handles: list[Any] = []
    try:
        yield handles.append
    finally:
        for handle in handles:
            handle.remove()


# -- what geomon captured ----------------------------------------------------------------------


class Seen(NamedTuple):
    """Rows of the model's own tensors that a layer holds; None for tensors that were not kept."""

    rows: Tensor | None = None  # of the hidden states, flattened to [tokens, width]
    query_rows: Tensor | None = None  # of the output of the projections, flattened
    key_rows: Tensor | None = None
    sequences: Tensor | None = None  # of the attention call
    places: Tensor | None = None  # of the sampled queries, [sequences, queries]
    layer: Layer | None = None  # as geomon captured it


def watch(model: nn.Module, inputs: Mapping[str, Any], rows: int = 100_000) -> tuple[Any, Window]:
    """The model's output under an open window, and the window."""
    anatomy, plans = find_anatomy(model), Plans()
    windows = [Window(anatomy, set(CAPTURED), rows=rows, seed=0, plans=plans) for _ in range(2)]
    state = torch.get_rng_state()
    for window in windows:  # the second knows what the first understood
        torch.set_rng_state(state)
        with window:
            output = model(**inputs)
    check_same(windows[1].snapshot(), windows[0].snapshot())
    return output, windows[0]


def check_same(found: Snapshot, expected: Snapshot) -> None:
    """Compare all views of two snapshots, on whichever device they are."""
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert layer.missing == other.missing
        assert layer.captured.keys() == other.captured.keys()
        for view, value in other.captured.items():
            own = layer.captured[view]
            if isinstance(value, Tensor):
                torch.testing.assert_close(own.cpu(), value, rtol=0, atol=0, equal_nan=True)
            else:
                assert own == value, view


def routes_of(window: Window, stacks: Iterable[str]) -> set[str]:
    """List the routes by which the window saw the attention of the stacks."""
    found = [window.routes(name, label) for name in stacks for label in ("", "cross")]
    return set().union(*found) or {"none"}


def notes_of(window: Window) -> set[str]:
    """List the notes of the snapshot, except the share of padding."""
    texts = {note.text for note in window.snapshot().info.notes}
    return {text for text in texts if "padding, " not in text}


def sampled(window: Window, stack: str, index: int) -> Seen:
    """Find which rows a layer of the snapshot holds, from the window's private state."""
    for stack_pass in window._tracker.passes:
        names = {
            side_stack_name(stack_pass, label, window._tracker.passes): label
            for label in stack_pass.stack.side_labels
        }
        if stack != stack_pass.stack.name and stack not in names:
            continue
        known = stack_pass.settle()
        if index == 0:
            entered = stack_pass.input_rows
            return Seen(indices_of_tokens(known, entered))
        block, block_call, _ = stack_pass.layers()[index - 1]
        attention = attention_key(block, names.get(stack, ""))
        if block_call is None or attention is None:
            return Seen()
        seen = block_call.seen(attention)
        call, hidden = seen.call, block_call.hidden
        query, key = seen.projected or (None, None)
        return Seen(
            *(indices_of_tokens(known, rows) for rows in (hidden, query, key)),
            None if call is None else call.sequences,
            None if call is None else call.places,
        )
    raise KeyError(f"there is no stack '{stack}'")


def indices_of_tokens(known: KnownTokens, rows: SampledRows | None) -> Tensor | None:
    """Return the flat indices of the rows that are no padding."""
    return None if rows is None else known.of(rows.shape, rows.role).among(rows.indices)[1]


def seen_layers(window: Window) -> dict[Place, Seen]:
    """Collect the layers that a window saw, by stack and depth."""
    return {
        (layer.stack, layer.index): sampled(window, layer.stack, layer.index)._replace(layer=layer)
        for layer in window.snapshot().layers
    }


def rebuilt(layer: Layer) -> tuple[Tensor, Tensor]:
    """Attention probabilities from captured views, and the rows (of queries) that are real."""
    views = layer.captured
    if views.get("scores") is not None:
        scores = views["scores"].float()
    else:
        group = views["query"].shape[1] // views["key"].shape[1]
        keys = views["key"].repeat_interleave(group, dim=1)
        scores = views["query"] @ keys.transpose(-1, -2) * views["scale"]
        if views.get("softcap") is not None:
            scores = views["softcap"] * (scores / views["softcap"]).tanh()
        if views.get("bias") is not None:
            scores = scores + views["bias"]
    visible = views["visible"].expand(scores.shape)
    scores = scores.masked_fill(~visible, -torch.inf)
    if views.get("sink") is not None:
        sink = views["sink"][None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1], visible.any(dim=-1)
    return scores.softmax(dim=-1), visible.any(dim=-1)


# -- the comparison ----------------------------------------------------------------------------


@dataclass
class Verdict:
    """Largest differences over the layers, and all that is not as it should be.

    Attributes:
        attention: Largest difference of attention probabilities; None if none was compared.
        projected: Largest difference of projected queries and keys.
        hidden: Largest difference of hidden states.
        identical: Whether the model's outputs are equal to the bit.
        routes: Routes by which attention was seen.
        faults: Everything else that is wrong, in words.
        missing: (stack, view) -> the reasons that geomon gives.
        notes: Notes of geomon, except the share of padding.
    """

    attention: float | None = None
    projected: float | None = None
    hidden: float | None = None
    identical: bool = True
    routes: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    missing: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)

    def worst(self, what: str, difference: float) -> None:
        """Keep the largest difference of one kind."""
        before = getattr(self, what)
        setattr(self, what, difference if before is None else max(before, difference))


def compare(
    specimen: Specimen, reference: Reference, found: Mapping[Place, Seen], verdict: Verdict, *,
    padded: bool, rows: int = 10**9,
) -> None:  # fmt: skip
    """Compare what geomon captured with what the model computes; add to the verdict.

    Args:
        specimen: The model.
        reference: Tensors that it computes.
        found: Layers that geomon captured.
        verdict: Verdict on this specimen.
        padded: Whether the inputs had padding.
        rows: How many rows were to be kept; by default all.
    """
    inputs = specimen.inputs()
    real = specimen.padding(inputs) if padded else {}
    expected = set(reference.hidden) | set(reference.attention)
    if set(found) != expected:
        verdict.faults.append(
            f"layers: {sorted(set(found) - expected)} too many, "
            f"{sorted(expected - set(found))} not seen"
        )
    for place in sorted(expected & set(found)):
        stack, seen = specimen.stacks[place[0]], found[place]
        for view, why in seen.layer.missing.items():
            if source_of(view) == "last":  # of these rows, in tests/capture/tokens/test_pass_tokens
                continue
            verdict.missing.setdefault((place[0], view), set()).add(why)
        valid = real.get(place[0])
        keys = real.get("encoder", real.get("memory")) if place[0] == "cross" else valid
        one = _Comparison(place, inputs, stack, seen, reference, valid, keys, rows, verdict)
        for part in (one.hidden, one.projections, one.attention):
            try:
                part()
            except Exception as error:
                verdict.faults.append(f"{place}: {type(error).__name__}: {error}")


# The input that holds a stack's token ids.
_TOKENS = {"decoder": ("decoder_input_ids",)}


class _Comparison(NamedTuple):
    """One layer, as captured and as computed."""

    place: Place
    inputs: Mapping[str, Any]
    stack: Stack
    seen: Seen
    reference: Reference
    valid: Tensor | None  # real tokens, [sequences, length]
    valid_keys: Tensor | None  # of what is attended to
    rows: int
    verdict: Verdict

    def has(self, view: str) -> bool:
        """Whether the view was captured; what is neither captured nor missing is a fault."""
        if view in self.seen.layer.missing:
            return False
        if view not in self.seen.layer.captured:
            raise LookupError(f"{view} is neither captured nor said to be missing")
        return True

    def hidden(self) -> None:
        """Hidden states, of the tokens that are no padding and of no others."""
        if self.place not in self.reference.hidden or not self.has("hidden"):
            return
        captured = self.seen.layer.captured["hidden"]
        states = _width_last(self.reference.hidden[self.place])
        rows = self.seen.rows
        self.check_rows(rows, states.shape[:-1], self.valid)
        self.check_tokens(rows, states)
        self.verdict.worst("hidden", _difference(states.flatten(0, -2)[rows], captured))

    def check_tokens(self, rows: Tensor, states: Tensor) -> None:
        """Position in its sequence and token id of each row."""
        views, second = self.seen.layer.captured, states.shape[1]
        if states.ndim > 2:
            inner = states[0, ..., 0].numel()
            positions = rows // second if self.stack.length_first else rows % inner
            if not torch.equal(views["positions"], positions):
                self.verdict.faults.append(f"{self.place}: positions are not those of the rows")
        if self.has("token_ids"):
            names = _TOKENS.get(self.place[0], ("input_ids", "idx"))
            ids = next(self.inputs[name] for name in names if name in self.inputs)
            ids = (ids.T if self.stack.length_first else ids).flatten()[rows]
            if not torch.equal(views["token_ids"], ids):
                self.verdict.faults.append(f"{self.place}: token ids are not those of the rows")

    def check_rows(self, rows: Tensor, shape: torch.Size, valid: Tensor | None) -> None:
        """Rows are real tokens, each once, and as many as there should be."""
        real = torch.ones(shape, dtype=torch.bool)
        if valid is not None:
            real = valid.T if self.stack.length_first or valid.shape != shape else valid
        tokens = set(real.flatten().nonzero().squeeze(1).tolist())
        kept = rows.tolist()
        if len(kept) != min(self.rows, len(tokens)) or len(set(kept) & tokens) != len(kept):
            self.verdict.faults.append(f"{self.place}: rows are not those of real tokens")

    def projections(self) -> None:
        """Queries and keys as projected."""
        if (
            not self.stack.query
            and not self.stack.holder
            and self.place in self.reference.attention
        ):
            self.stand_ins()
        for which, valid in (("query", self.valid), ("key", self.valid_keys)):
            expected = getattr(self.reference, which).get(self.place)
            if expected is not None and self.has(f"projected_{which}"):
                rows = getattr(self.seen, f"{which}_rows")
                hidden = self.reference.hidden.get(self.place)
                if hidden is not None and expected.shape[:2] == hidden.shape[1::-1]:
                    expected = expected.transpose(0, 1)
                self.check_rows(rows, expected.shape[:-2], valid)
                captured = self.seen.layer.captured[f"projected_{which}"]
                expected = expected.flatten(0, -3)
                if self.stack.windows:  # in which order: tests/capture/tap/test_columns.py
                    expected, captured = (x[x[:, 0, 0].argsort()] for x in (expected, captured))
                    rows = slice(None)
                self.verdict.worst("projected", _difference(expected[rows], captured))

    def stand_ins(self) -> None:
        """Compare queries and keys as attended, on real tokens, if no module projects to them."""
        views, sequences, places = self.seen.layer.captured, self.seen.sequences, self.seen.places
        for which in ("query", "key"):
            if self.has(f"projected_{which}"):
                attended = views[which].transpose(1, 2)
                if self.valid is not None:
                    attended = attended[self.valid[sequences].gather(1, places)]
                captured = views[f"projected_{which}"]
                rows = attended.reshape(-1, *attended.shape[-2:])
                if _difference(rows, captured) > 0:
                    self.verdict.faults.append(f"{self.place}: {which} is not as attended")

    def attention(self) -> None:
        """Attention probabilities of the sampled queries that are no padding."""
        expected = self.reference.attention.get(self.place)
        if expected is None or not self.has("visible"):
            return
        probabilities, real = rebuilt(self.seen.layer)
        sequences, places = self.seen.sequences, self.seen.places
        whole = torch.arange(expected.shape[2]).expand(expected.shape[0], -1)
        if self.rows > whole.numel() and not torch.equal(places, whole):
            self.verdict.faults.append(f"{self.place}: the queries are not all of them")
        valid = torch.ones_like(whole, dtype=torch.bool) if self.valid is None else self.valid
        count = int(valid[sequences].gather(1, places).sum()) * expected.shape[1]
        if int(real.sum()) != count:
            self.verdict.faults.append(
                f"{self.place}: {int(real.sum())} rows of attention, not {count}"
            )
        index = places[:, None, :, None].expand(-1, expected.shape[1], -1, expected.shape[3])
        truth = expected[sequences].gather(2, index)
        self.verdict.worst("attention", _difference(probabilities[real], truth[real]))


def _width_last(states: Tensor) -> Tensor:
    """Feature maps [n, width, height, breadth] as [n, height, breadth, width]."""
    return states.movedim(1, -1) if states.ndim == 4 else states


def _difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        raise ValueError(f"{list(other.shape)} was captured, of {list(one.shape)}")
    return float((one - other).abs().max())
