"""One pass of a model under a window, and blocks whose attention is any function."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geomon.capture import Plans, Window, find_anatomy
from geomon.capture.snapshot import CAPTURED, Layer, Snapshot
from support.referee import check_same, rebuilt, sampled, without_fast_path

HEADS = 4

# Takes queries, keys and values, each [sequences, heads, length, width].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def window(
    model: nn.Module, rows: int = 100_000, seed: int = 0, *, blocks: Any = None,
    views: Iterable[str] = CAPTURED, **options: Any,
) -> Window:  # fmt: skip
    return Window(find_anatomy(model, blocks), set(views), rows=rows, seed=seed, **options)


def look(
    model: nn.Module, *inputs: Any, rows: int = 100_000, options: Mapping[str, Any] | None = None,
    **given: Any,
) -> Window:  # fmt: skip
    """Open a window around a pass in eval mode, whose output it must not change.

    `options` go to the window, everything else to the model. A second window, which knows what the
    first one understood, must see the same.
    """
    model.eval()
    with torch.no_grad(), without_fast_path():
        alone = model(*inputs, **given)
        again = {"plans": Plans(), **(options or {})}
        with window(model, rows, **again) as seen:
            watched = model(*inputs, **given)
        with window(model, rows, **again) as seen_again:
            model(*inputs, **given)
    assert not isinstance(alone, Tensor) or torch.equal(watched, alone)
    check_same(seen_again.snapshot(), seen.snapshot())  # by what the first pass taught
    assert notes(seen_again) == notes(seen)
    return seen


def states_of(
    model: nn.Module, *given: Any, blocks: Iterable[nn.Module] = (), **named: Any
) -> list[Tensor]:
    """Return the input of the first block and the output of each block, from a pass of its own."""
    blocks, kept = [*(blocks or model.blocks)], []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(output if isinstance(output, Tensor) else output[0])

    handles = [block.register_forward_hook(keep) for block in blocks]
    enters = blocks[0].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad(), without_fast_path():
        model.eval()(*given, **named)
    for handle in (enters, *handles):
        handle.remove()
    return kept


def notes(seen: Window) -> list[str]:
    return [note.words() for note in seen.snapshot().info.notes]


def in_order(layer: Layer, *views: str) -> list[Tensor]:
    """Views of the rows of a layer in the order of the batch."""
    seen = layer.captured
    order = (1000 * seen["sequences"] + seen["positions"]).argsort(stable=True)
    return [seen[view][order] for view in views]


def by_place(snapshot: Snapshot) -> dict[tuple[str, int], Layer]:
    return {(layer.stack, layer.index): layer for layer in snapshot.layers}


def check_hidden(seen: Window, depth: int, state: Tensor) -> None:
    """Hold the hidden states of a layer against the model's own, [batch, length, width]."""
    layer, rows = by_place(seen.snapshot())["", depth], sampled(seen, "", depth).rows
    assert torch.equal(layer.captured["hidden"], state.flatten(0, -2)[rows])


def check_attention(
    seen: Window, stack: str, depth: int, attention: nn.Module, order: Tensor | None = None
) -> None:
    """Hold the views of an attention against the `query`, `key` and `weights` that it has kept.

    `order` has the row of the attention's own for each row of the hidden states; None if these are
    the same.
    """
    layer, chosen = by_place(seen.snapshot())[stack, depth], sampled(seen, stack, depth)
    found, kept = rebuilt(layer)
    truth = attention.weights[chosen.sequences]
    torch.testing.assert_close(found[kept], truth[kept], atol=1e-6, rtol=0)
    for which, rows in (("query", chosen.query_rows), ("key", chosen.key_rows)):
        expected = getattr(attention, which).transpose(1, 2).flatten(0, 1)
        own = rows if order is None else order[rows]
        assert torch.equal(layer.captured[f"projected_{which}"], expected[own])


def check_scores(
    layer: Layer, own: nn.Module, visible: Tensor, *, bias: Tensor | float = 0.0,
    scale: float | None = None, softcap: float | None = None, earlier: Tensor | None = None,
) -> None:  # fmt: skip
    """Hold a layer against all scores of the `query` and `key` that an attention has kept.

    `earlier` are keys before those.
    """
    key = own.key if earlier is None else torch.cat([earlier, own.key], dim=2)
    views, query = layer.captured, own.query.double()
    found = views["visible"].expand(*query.shape[:3], key.shape[2])
    assert torch.equal(found, visible.expand_as(found))
    keys = key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = (scores + bias).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(rebuilt(layer)[0].double().nan_to_num(), weights, **near)
    torch.testing.assert_close(views["max_logits"].double(), scores.amax((0, 2, 3)), **near)
    assert not views["max_logits"].requires_grad
    torch.testing.assert_close(views["query"], own.query)
    torch.testing.assert_close(views["key"], key)


def check_projected(layer: Layer, own: nn.Module) -> None:
    """Hold queries and keys as projected against those that an attention has kept."""
    views = layer.captured
    for which in ("query", "key"):
        rows = views[f"{which}_sequences"], slice(None), views["positions"]
        assert torch.equal(views[f"projected_{which}"], getattr(own, which)[rows])


def check_blocks(seen: Window, model: nn.Module, visible: Tensor, **options: Any) -> None:
    """Hold the layers of `blocks_of` against all scores of their attentions."""
    for layer, block in zip(seen.snapshot().layers[1:], model, strict=True):
        check_scores(layer, block.attention, visible, **options)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / q.shape[-1] ** 0.5


def attend_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).softmax(-1) @ v


class Attention(nn.Module):
    """Projections as most have them, around a function; it keeps its queries and keys."""

    def __init__(
        self, attend: Attend, width: int, *, heads: int = HEADS, key_heads: int | None = None
    ) -> None:
        super().__init__()
        self.num_heads, self.attend, self.size = heads, attend, width // heads
        made = self.size * (key_heads or heads)
        self.q_proj = nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, made), nn.Linear(width, made)

    def forward(self, x: Tensor) -> Tensor:
        self.query, self.key, value = (
            projection(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.attend(self.query, self.key, value).transpose(1, 2).flatten(2)


class ToContext(nn.Module):
    """Attention of its own, or to a context, as diffusers has it; it keeps its weights."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.heads, self.by_hand = HEADS, by_hand
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, 32, bias=False) for _ in "qkv")
        self.to_out = nn.ModuleList([nn.Linear(32, 32), nn.Dropout(0.0)])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        self.query, self.key, value = (
            made.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for made in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        scores = scores_of(self.query, self.key)
        # No softmax that a window could see.
        self.weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        attend = attend_by_hand if self.by_hand else F.scaled_dot_product_attention
        mixed = attend(self.query, self.key, value).transpose(1, 2).flatten(2)
        return self.to_out[1](self.to_out[0](mixed))


class Block(nn.Module):
    def __init__(self, attend: Attend, width: int, **options: Any) -> None:
        super().__init__()
        self.attention = Attention(attend, width, **options)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def blocks_of(attend: Attend, width: int = 32, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(attend, width, **options) for _ in range(2)))
