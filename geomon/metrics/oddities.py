"""Oddities: definite differences of a few layers from all others, which need no statistics."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from geomon.capture import Layer
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import Columns

# Share of the rows above which one token is named. In English text of characters, spaces make up
# a sixth; with fewer kinds of tokens than this, a large share is normal.
_OF_ONE_TOKEN, _FEWEST_KINDS = 1 / 3, 8
# Factor between the sizes of neighbouring layers above which it is named.
_HUNDREDFOLD = 100.0
# Entropy relative to uniform attention, above which attention is uniform, and below which it is
# not. Layers of random weights have more than the first; so have all layers before training.
_UNIFORM, _SELECTIVE = 0.999, 0.9
# Digits to which both the entropy and the product of mean query and mean key of two heads agree.
_EQUAL, _NAMED = ".6g", 4
_FEWEST_LAYERS = 3  # of which most have to agree

Traits = dict[str, float]


def traits_of(layer: Layer) -> Traits:
    """Collect what the captured views show of a layer, as numbers that ranks can exchange."""
    captured = layer.captured
    traits: Traits = {}
    if captured.get("visible") is not None:
        traits |= _reach(captured["visible"])
    scale, query = captured.get("scale"), captured.get("query")
    # By hand, a bias and a factor of 1 may stand for an unknown factor.
    is_known = scale != 1 or captured.get("bias") is None
    if isinstance(scale, float) and query is not None and is_known:
        traits |= {"scale": scale, "scale_by_width": scale * math.sqrt(query.shape[-1])}
    ids, hidden = captured.get("token_ids"), captured.get("hidden")
    if ids is not None and len(ids) and not layer.of_weights:
        kinds, counts = ids.unique(return_counts=True)
        most = int(counts.argmax())
        traits |= {"kinds": len(kinds), "most_frequent": int(kinds[most])}
        traits["share_of_one"] = float(counts[most]) / len(ids)
    if hidden is not None and len(hidden) and not layer.of_weights:
        traits["size"] = float(torch.linalg.vector_norm(hidden, dim=1).median())
    return traits


def _reach(visible: Tensor) -> Traits:
    """Find the last keys that sampled queries see, and whether each sees further than the last."""
    keys, seen = visible.shape[3], visible.any(dim=1)
    # In bytes, because a mask may have millions of places; argmax finds the first of equals.
    last = keys - seen.flip(2).to(torch.uint8).argmax(dim=2)  # 1 for the first key
    last.masked_fill_(~seen.any(dim=2), 0)
    whole = (last > 0).all(dim=1)  # sequences without padding
    if not whole.any():
        return {}
    last = last[whole]
    traits = {"keys": keys, "last_key": float(last.double().mean())}
    if last.shape[1] > 1:  # the place of a query is known only by comparison
        traits["is_causal"] = float((last.diff(dim=1) > 0).all())
    else:
        traits["is_causal"] = 0.0  # one mask for all queries
    return traits


def oddities(traits: Mapping[int, Traits], columns: Columns) -> list[Note]:
    """Name the layers of a stack that differ from the others, and what else is odd in a pass.

    Args:
        traits: Traits of each layer (see `traits_of`), by depth.
        columns: Values of the stack, by metric; none if nothing was measured.
    """
    found = [
        _later_keys(traits),
        _other_scale(traits),
        _uniform(columns),
        _equal_heads(columns),
        _one_token(traits),
        *_jumps(traits),
    ]
    return [msgspec.structs.replace(note, is_odd=True) for note in found if note is not None]


def odd_layers(layers: Sequence[Layer]) -> list[Note]:
    """Name what is odd in the layers of a pass, as far as it shows without any measurement.

    Args:
        layers: The layers of all stacks.
    """
    traits: dict[str, dict[int, Traits]] = {}
    for layer in layers:
        if not layer.of_weights:
            traits.setdefault(layer.stack, {})[layer.index] = traits_of(layer)
    return [
        msgspec.structs.replace(note, stack=stack)
        for stack, own in traits.items()
        for note in [*oddities(own, {}), *_unusual_scale(own)]
    ]


def _unusual_scale(traits: Mapping[int, Traits]) -> list[Note]:
    """Say how a stack scales its scores, if all layers do it alike but not as most models do.

    Some models do so by design and compensate in their weights, so it is not an oddity.
    """
    scales = {own["scale"]: own["scale_by_width"] for own in traits.values() if "scale" in own}
    if len(scales) != 1:
        return []
    ((scale, by_width),) = scales.items()
    if math.isclose(by_width, 1.0, rel_tol=1e-3):
        return []
    text = "all layers scale scores of attention by {scale:.3g}, most models by {usual:.3g}"
    return [Note(NoteKind.UNUSUAL_SCALE, text, numbers={"scale": scale, "usual": scale / by_width})]


def _differing(values: Mapping[int, float], is_odd: Callable[[float, float], bool]) -> list[int]:
    """Return the layers whose values are odd, given the value that most layers share."""
    if len(values) < _FEWEST_LAYERS:
        return []
    (common, count), *_ = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return []
    return [layer for layer, value in values.items() if is_odd(value, common)]


def _later_keys(traits: Mapping[int, Traits]) -> Note | None:
    """Name layers that see keys after the query while most layers see none."""
    causal = {at: own["is_causal"] for at, own in traits.items() if "is_causal" in own}
    reach = {traits[at]["last_key"] for at, is_causal in causal.items() if is_causal}
    layers = [
        at
        for at in _differing(causal, lambda own, common: own < common)
        if traits[at]["last_key"] > max(reach)
    ]
    if not layers:
        return None
    text = "attention sees keys after the query{where}; in the other layers it does not"
    return Note(NoteKind.LATER_KEYS, text, layers=tuple(layers))


def _other_scale(traits: Mapping[int, Traits]) -> Note | None:
    """Name layers whose scores are scaled by another factor than in most layers."""
    rounded = {
        at: float(f"{own['scale_by_width']:.5g}")
        for at, own in traits.items()
        if "scale_by_width" in own
    }
    layers = _differing(rounded, lambda own, common: own != common)
    if not layers:
        return None
    other = next(traits[at]["scale"] for at in rounded if at not in layers)
    text = (
        "scores of attention are scaled by {own:.3g}{where}, and in the other layers by {other:.3g}"
    )
    numbers = {"own": traits[layers[0]]["scale"], "other": other}
    return Note(NoteKind.OTHER_SCALE, text, layers=tuple(layers), numbers=numbers)


def _uniform(columns: Columns) -> Note | None:
    """Name layers whose attention is uniform while it is selective in most layers."""
    column = columns.get("attention_entropy_normalised")
    values = {} if column is None else column.by_layer()
    layers = [at for at, value in values.items() if value > _UNIFORM]
    selective = sum(value < _SELECTIVE for value in values.values())
    if not layers or len(values) < _FEWEST_LAYERS or 2 * selective <= len(values):
        return None
    text = (
        "attention is uniform{where}, as with random weights or queries of 0; in most layers it is "
        "not"
    )
    return Note(NoteKind.UNIFORM, text, layers=tuple(layers))


def _equal_heads(columns: Columns) -> Note | None:
    """Name heads of one layer whose attention is the same, as if one was copied into another."""
    entropies, products = (
        columns[name].by_head() if name in columns else {}
        for name in ("attention_entropy_normalised", "qk_dot")
    )
    places: dict[tuple[int, str, str], list[tuple[int, int]]] = {}
    for place, entropy in entropies.items():
        product = products.get(place, math.nan)
        if entropy < _UNIFORM and math.isfinite(product):
            key = place[0], f"{entropy:{_EQUAL}}", f"{product:{_EQUAL}}"
            places.setdefault(key, []).append(place)
    heads = tuple(place for alike in places.values() if len(alike) > 1 for place in alike)
    if not heads:
        return None
    named = "; ".join(f"layer {layer}, head {head}" for layer, head in heads[:_NAMED])
    text = "heads attend alike, number for number: {named}{more}"
    more = f" and {len(heads) - _NAMED} more" if len(heads) > _NAMED else ""
    return Note(NoteKind.EQUAL_HEADS, text, heads=heads, numbers={"named": named, "more": more})


def _one_token(traits: Mapping[int, Traits]) -> Note | None:
    """Name a token that makes up much of the rows, which may be padding without a mask."""
    for own in traits.values():
        if own.get("share_of_one", 0) > _OF_ONE_TOKEN and own["kinds"] >= _FEWEST_KINDS:
            text = (
                "token {token} makes up {share:.0f} % of the rows: if it is padding, pass an "
                "attention mask, so that it is left out"
            )
            numbers = {"token": int(own["most_frequent"]), "share": 100 * own["share_of_one"]}
            return Note(NoteKind.ONE_TOKEN, text, numbers=numbers)
    return None


def _jumps(traits: Mapping[int, Traits]) -> list[Note]:
    """Name layers whose hidden states are much larger or smaller than in the layer before."""
    found = {
        at: own["size"] / traits[at - 1]["size"]
        for at, own in traits.items()
        if "size" in own and traits.get(at - 1, {}).get("size")
    }
    notes = []
    for kind, word, factors in (
        (NoteKind.LARGER, "larger", {at: x for at, x in found.items() if x > _HUNDREDFOLD}),
        (
            NoteKind.SMALLER,
            "smaller",
            {at: 1 / x for at, x in found.items() if 0 < x < 1 / _HUNDREDFOLD},
        ),
    ):
        if factors:
            text = (
                f"hidden states up to {{factor:,.0f}} times {word} than one layer before{{where}}"
            )
            notes.append(
                Note(
                    kind, text, layers=tuple(factors),
                    numbers={"factor": max(factors.values())},
                )
            )  # fmt: skip
    return notes


__all__ = ["Traits", "odd_layers", "oddities", "traits_of"]
