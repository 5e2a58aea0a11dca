"""The window: hooks in, sampled rows kept during one forward pass, hooks out.

Nothing stays on the model between windows: hooks that stay cost every step, break pickling and make
compiled models recompile. A hook selects rows and copies them, and does no arithmetic.
"""

import math
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from geomon.anatomy import Anatomy, Projections
from geomon.attended import RELEVANT, AttentionCall, NotUnderstoodError, captured_attention
from geomon.layer import CAPTURED, Layer, Snapshot
from geomon.notes import Note, grouped
from geomon.switches import listening, run_eagerly, without_fast_path

# Query rows per layer from which attention is measured: the standard error of a mean entropy with
# a spread of 1 nat is then 0.03.
QUERIES = 1024

_NOT_RUN = (
    "the block was not run under the window (called by .forward() directly, skipped, or compiled "
    "in a way that hides it); call the model itself, or measure by a probe"
)
_NO_ATTENTION = (
    "no attention call was seen in the block: it neither goes through transformers' attention "
    "interface nor through torch.nn.functional.scaled_dot_product_attention"
)
_NO_TOKENS = "no embedding outside the blocks was given integers of the hidden states' shape"


class Window:
    """A context manager that keeps sampled rows of one forward pass.

    Args:
        anatomy: Where the blocks are.
        views: Captured views that are wanted; hooks are placed for these only.
        rows: Rows of hidden states to keep; the same at every layer.
        seed: Seeds the private generator that draws them. No global random state is touched.

    After the `with`, `snapshot()` gives what was seen. The first call of a module counts; calls
    from other threads and recomputation under activation checkpointing are ignored.
    """

    def __init__(self, anatomy: Anatomy, views: set[str], *, rows: int, seed: int) -> None:
        self._anatomy = anatomy
        self._sources = {CAPTURED[view] for view in views}
        self._wants_tokens = bool(views & {"token_ids", "positions"})
        self._budget = rows
        self._generator = torch.Generator().manual_seed(seed)
        self._thread = threading.get_ident()
        self._exit = ExitStack()
        self._running: list[int] = []  # depths of the blocks that are being run
        self._shape: torch.Size | None = None  # of hidden states, without the width
        self._rows = torch.empty(0, dtype=torch.int64)
        self._valid: Tensor | None = None
        self._token_ids: list[Tensor] = []
        self._hidden: dict[int, Tensor] = {}
        self._projected: dict[int, dict[str, Tensor]] = {}
        self._calls: dict[int, AttentionCall] = {}
        self._chosen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._refused: dict[int, str] = {}
        self._remarks: dict[str, list[int]] = {}  # and the layers of which they are true
        self._mode = "eval"
        self._dtype = ""
        self._precision = 0.0
        self.seconds = 0.0  # spent in hooks, and in placing and removing them

    def __enter__(self) -> Self:
        began = time.perf_counter()
        with ExitStack() as stack:  # undone whatever happens while it is built
            self._place_hooks(stack)
            if self._sources & {"attention", "projection"}:
                stack.enter_context(listening(self._on_attention))
            stack.enter_context(without_fast_path())
            stack.enter_context(run_eagerly())
            self._exit = stack.pop_all()
        self.seconds += time.perf_counter() - began
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        began = time.perf_counter()
        self._exit.close()
        self.seconds += time.perf_counter() - began

    def snapshot(self) -> Snapshot:
        """What was seen, on the host, in float32, without rows that are not finite."""
        depths = range(len(self._anatomy.blocks) + 1)
        self._remarks.clear()
        layers = [self._layer(depth) for depth in depths]
        notes = grouped({("hidden states", why): found for why, found in self._remarks.items()})
        if self._valid is not None and not bool(self._valid.all()):
            share = float((~self._valid).float().mean())
            notes.append(Note("padding", f"padding, {share:.0%} of the tokens, was left out"))
        return Snapshot(layers, len(self._rows), self._mode, self._dtype, notes)

    def _remark(self, depth: int, remark: str) -> None:
        self._remarks.setdefault(remark, []).append(depth)

    # -- hooks ---------------------------------------------------------------------------------

    def _place_hooks(self, stack: ExitStack) -> None:
        def hold(handle: Any) -> None:
            stack.callback(handle.remove)

        for module in self._anatomy.above:
            hold(module.register_forward_pre_hook(self._on_call_above, with_kwargs=True))
        if self._wants_tokens:
            for module in self._anatomy.embeddings:
                hold(module.register_forward_pre_hook(self._on_embedding))
        for depth, block in enumerate(self._anatomy.blocks, start=1):
            hold(block.module.register_forward_pre_hook(self._entering(depth), with_kwargs=True))
            hold(block.module.register_forward_hook(self._leaving(depth)))
            if "projection" in self._sources and block.projections is not None:
                self._place_projection_hooks(hold, depth, block.projections)

    def _place_projection_hooks(self, hold: Any, depth: int, projections: Projections) -> None:
        hold(projections.query.register_forward_hook(self._projecting(depth, "query")))
        if not projections.fused:
            hold(projections.key.register_forward_hook(self._projecting(depth, "key")))

    def _ignored(self) -> bool:
        """Whether the present call is another thread's or a recomputation inside backward."""
        recomputing = torch._C._current_graph_task_id() != -1
        return recomputing or threading.get_ident() != self._thread

    def _on_call_above(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if (
            self._valid is None
            and isinstance(mask, Tensor)
            and mask.ndim == 2
            and not self._ignored()
        ):
            self._valid = mask.detach().bool()

    def _on_embedding(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        ids = args[0] if args else None
        if isinstance(ids, Tensor) and not ids.is_floating_point() and not self._ignored():
            self._token_ids.append(ids.detach().clone())

    def _entering(self, depth: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if self._ignored():
                return
            began = time.perf_counter()
            self._running.append(depth)
            if depth == 1:
                self._mode = "train" if module.training else "eval"
                self._keep_hidden(0, _first_tensor([*args, *kwargs.values()]))
            self.seconds += time.perf_counter() - began

        return hook

    def _leaving(self, depth: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._ignored():
                return
            began = time.perf_counter()
            if self._running and self._running[-1] == depth:
                self._running.pop()
            values = output.values() if isinstance(output, Mapping) else output
            self._keep_hidden(depth, _first_tensor(values))
            self.seconds += time.perf_counter() - began

        return hook

    def _projecting(self, depth: int, which: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            kept = self._projected.setdefault(depth, {})
            if self._ignored() or which in kept or not isinstance(output, Tensor):
                return
            began = time.perf_counter()
            if output.shape[:-1] == self._shape:
                kept[which] = _select(output, self._rows)
            self.seconds += time.perf_counter() - began

        return hook

    @torch.no_grad()
    def _on_attention(
        self, route: str, module: Any, query: Any, key: Any, mask: Any, options: dict[str, Any]
    ) -> None:
        if not self._running or self._running[-1] in self._calls or self._ignored():
            return
        began = time.perf_counter()
        depth = self._running[-1]
        if not isinstance(query, Tensor) or query.ndim != 4 or query.is_nested:
            self._refused.setdefault(depth, "queries are not a tensor of four dimensions")
        elif mask is not None and not isinstance(mask, Tensor):
            self._refused.setdefault(depth, f"the mask is a {type(mask).__name__}, not a tensor")
        else:
            self._calls[depth] = self._thin(route, module, query, key, mask, options)
        self.seconds += time.perf_counter() - began

    # -- what a hook keeps ---------------------------------------------------------------------

    def _keep_hidden(self, depth: int, hidden: Tensor | None) -> None:
        if hidden is None or depth in self._hidden:
            return
        if self._shape is None:
            self._choose_rows(hidden)
        if hidden.shape[:-1] == self._shape:
            self._hidden[depth] = _select(hidden, self._rows)

    def _choose_rows(self, hidden: Tensor) -> None:
        """Draw the rows that are kept at every layer, among those that are no padding."""
        self._shape = hidden.shape[:-1]
        self._dtype = str(hidden.dtype).removeprefix("torch.")
        self._precision = torch.finfo(hidden.dtype).eps
        if self._valid is not None and self._valid.shape != self._shape:
            self._valid = None
        total = math.prod(self._shape)
        rows = torch.randperm(total, generator=self._generator)
        if self._valid is not None:
            rows = rows[self._valid.flatten().cpu()[rows]]
        self._rows = rows[: self._budget]

    def _thin(
        self, route: str, module: Any, query: Tensor, key: Tensor, mask: Tensor | None,
        options: dict[str, Any],
    ) -> AttentionCall:  # fmt: skip
        """The call with sampled queries only, against all keys of the sampled sequences."""
        sequences, places = self._choose_queries(query)
        by_key = route == "interface" and mask is not None and mask.ndim == 2  # [sequences, keys]
        if mask is not None:
            mask = mask[:, None, None, :] if by_key else mask[(None,) * (4 - mask.ndim)]
            mask = (mask[sequences] if mask.shape[0] > 1 else mask).detach()
            mask = _at_places(mask, places) if mask.shape[2] > 1 else mask.clone()
        causal = options.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", False)
        scale = options.get("scaling", options.get("scale"))
        return AttentionCall(
            query=_at_places(query.detach()[sequences], places),
            key=key.detach()[sequences],
            mask=mask,
            sequences=sequences,
            places=places,
            causal=bool(causal) and query.shape[2] > 1 and (mask is None or by_key),
            scale=None if scale is None else float(scale),
            options={name: options[name] for name in RELEVANT & options.keys()},
        )

    def _choose_queries(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Sequences, and positions in each, to keep; the same for all layers of one shape.

        Under a causal mask the entropy of a row grows with its position: positions are evenly
        spread, and shifted from sequence to sequence so that together they cover all alike.
        """
        sequences, length = query.shape[0], query.shape[2]
        if (sequences, length) not in self._chosen:
            some = max(1, min(sequences, self._budget // length))
            chosen = torch.randperm(sequences, generator=self._generator)[:some].sort().values
            each = min(length, math.ceil(QUERIES / some))
            shift = torch.randperm(some, generator=self._generator)[:, None] + 0.5
            places = (torch.arange(each)[None, :] + shift / some) * (length / each)
            self._chosen[sequences, length] = chosen, places.long()
        return self._chosen[sequences, length]

    # -- from what was kept to layers ----------------------------------------------------------

    def _layer(self, depth: int) -> Layer:
        block = self._anatomy.blocks[depth - 1] if depth else None
        captured: dict[str, Any] = {}
        missing: dict[str, str] = {}
        if depth in self._hidden:
            self._add_rows(depth, captured, missing)
        else:
            missing |= dict.fromkeys(("hidden", "token_ids", "positions", "precision"), _NOT_RUN)
        if block is not None and self._sources & {"attention", "projection"}:
            self._add_attention(depth, captured, missing)
            self._add_projections(depth, block.projections, captured, missing)
        if block is None:
            hidden_only = frozenset({"hidden"})
            return Layer(0, "input of the blocks", captured, missing, sources=hidden_only)
        return Layer(depth, block.name, captured, missing)

    def _add_rows(self, depth: int, captured: dict[str, Any], missing: dict[str, str]) -> None:
        hidden = self._hidden[depth].cpu()
        finite = hidden.isfinite().all(dim=1)
        if not finite.all():
            lost = int((~finite).sum())
            self._remark(depth, f"{lost} of {len(hidden)} rows are not finite and were left out")
        captured["hidden"] = hidden[finite]
        captured["precision"] = self._precision
        assert self._shape is not None
        captured["positions"] = (self._rows % self._shape[-1])[finite]
        tables = [ids for ids in self._token_ids if ids.shape == self._shape]
        if tables:
            # Several tables may be given the tokens' shape (token types, positions): the token ids
            # are those that vary most.
            ids = (
                max(tables, key=lambda table: len(table.unique())) if len(tables) > 1 else tables[0]
            )
            captured["token_ids"] = ids.flatten().cpu()[self._rows][finite]
        else:
            missing["token_ids"] = _NO_TOKENS

    def _add_attention(self, depth: int, captured: dict[str, Any], missing: dict[str, str]) -> None:
        call = self._calls.get(depth)
        reason = self._refused.get(depth, _NO_ATTENTION if depth in self._hidden else _NOT_RUN)
        if call is not None:
            valid = None
            if self._valid is not None and self._shape is not None:
                valid = self._valid.cpu()[call.sequences].gather(1, call.places)
            try:
                captured |= captured_attention(call, valid)
                return
            except NotUnderstoodError as error:
                reason = f"attention is not rebuilt here: {error}"
        missing |= dict.fromkeys(("query", "key", "visible", "bias", "scale"), reason)

    def _add_projections(
        self, depth: int, projections: Projections | None, captured: dict[str, Any],
        missing: dict[str, str],
    ) -> None:  # fmt: skip
        """Queries and keys as projected, [tokens, heads, head width]; as attended where unknown."""
        call = self._calls.get(depth)
        kept = self._projected.get(depth, {})
        if call is not None and projections is not None and len(kept) == 2 - projections.fused:
            query, key = kept["query"], kept.get("key")
            if key is None:
                query, key = query.chunk(3, dim=-1)[:2]
            width = call.query.shape[-1]
            fits = query.shape[-1] == call.query.shape[1] * width
            if fits and key.shape[-1] % width == 0:
                captured["projected_query"] = query.cpu().unflatten(-1, (-1, width))
                captured["projected_key"] = key.cpu().unflatten(-1, (-1, width))
                return
        if "query" in captured:
            # [sequences, heads, places, head width] -> rows
            captured["projected_query"] = captured["query"].transpose(1, 2).flatten(0, 1)
            captured["projected_key"] = captured["key"].transpose(1, 2).flatten(0, 1)
            self._remark(depth, "no projections found, Q and K as attended stand for them")
        else:
            reason = missing.get("query", _NO_ATTENTION)
            missing |= dict.fromkeys(("projected_query", "projected_key"), reason)


def _first_tensor(values: Any) -> Tensor | None:
    """The first floating-point tensor of a call's arguments or of a block's output."""
    if isinstance(values, Tensor):
        return values
    for value in values or ():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def _at_places(values: Tensor, places: Tensor) -> Tensor:
    """Rows of [sequences (or 1), heads, length, width] at each sequence's own places."""
    values = values.expand(len(places), -1, -1, -1)
    index = places.to(values.device)[:, None, :, None]
    return values.gather(2, index.expand(-1, values.shape[1], -1, values.shape[3]))


@torch.no_grad()
def _select(hidden: Tensor, rows: Tensor) -> Tensor:
    """A float32 copy of the given rows of `hidden`, flattened to [tokens, width]."""
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    return flat.index_select(0, rows.to(hidden.device, non_blocking=True)).float()
