"""Padding: which positions are padding, and how we know.

Attention shows it after the pass, by the keys hidden from every query. A mask with a name known
from transformers or torch, passed to a module around the blocks or to the first block, shows it
before rows are sampled, and also if attention cannot: a decoder hides only padding that comes
later. For decoders, labels of -100 show it as well. Other possible hints (masks with other names,
lengths) are named in a note but not read.
"""

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.storage import Shape
from geomon.capture.tokens import visibility
from geomon.failures import ignored
from geomon.note import Note
from geomon.note_kinds import NoteKind

# Arguments that are True or 1 for tokens.
_TOKENS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
# Arguments that are True or -inf for padding.
_PADDING = (
    "key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask",
    "encoder_padding_mask",
)  # fmt: skip
_MASKS = (*_TOKENS, *_PADDING)
# Name prefixes of masks over what a decoder attends to, not over its own tokens.
_OF_MEMORY = ("memory", "encoder")
# Name prefixes of masks over a decoder's own tokens.
_OF_DECODER = ("tgt", "decoder", "trg", "target")

# Names of arguments that may describe padding but are not read, and words that exclude it.
_UNREAD = re.compile(r"(^|_)(mask|pad|padding|valid|lens?|lengths?)$", re.IGNORECASE)
_OTHER = re.compile(
    r"loss|label|prompt|completion|answer|segment|type|causal|special|mlm|masked|future|subseq",
    re.IGNORECASE,
)

_ADDED = -1.0  # an additive mask is 0 for tokens and far below for padding
_IGNORED = -100  # the label that torch's cross-entropy ignores

HIDDEN_KEYS = "the keys that attention hides from every query"
_LABELS = f"labels of {_IGNORED}"

_EMPTY = "{name} leaves no token: it is not read as a padding mask"
_MAY_COUNT = (
    "padding may be counted: {name} may mark it, but its meaning is not known, and neither a mask "
    "with a known name nor attention shows it. Pass the model a mask [batch, length] as "
    "attention_mask to leave padding out"
)
_INVERTED = (
    "attention hides exactly the tokens that {name} marks as tokens: its values mean the opposite "
    "of what this name means elsewhere. Invert it, or call the argument padding_mask"
)


class _NamedMask(NamedTuple):
    """A mask, [batch, length], False for padding, and the name of its argument."""

    name: str
    valid: Tensor

    @property
    def of_keys(self) -> bool:
        """Whether it covers what a decoder attends to."""
        return self.name.startswith(_OF_MEMORY)


class Padding:
    """Padding tokens of one stack in one pass.

    If `first`, this is the model's first stack, which owns masks given to a module around several
    stacks. If `decodes`, the stack attends to another one, so that labels belong to its tokens; a
    call with the other's hidden states shows it as well.
    """

    def __init__(self, *, first: bool = True, decodes: bool = False) -> None:
        self._first, self._decodes = first, decodes
        self._given: list[_NamedMask] = []  # in the order seen
        self._labels: list[_NamedMask] = []  # which count if the stack decodes
        self._unread: dict[str, Tensor] = {}
        self.forget_attention()

    def forget_attention(self) -> None:
        """Forget what attention showed, because another pass begins with the same arguments."""
        # By role of the keys and (sequences, keys): True for keys hidden by every call so far.
        self._hidden: dict[tuple[str, Shape], Tensor] = {}
        self._over = False
        self._leaves_none: bool | None = None  # whether some mask leaves no token

    @torch.no_grad()
    def take_arguments(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        shared: bool = False,
    ) -> None:
        """Keep the arguments of a call that mark padding, or may mark it."""
        for name, values in named_tensors(module, args, kwargs):
            if name == "labels":
                self._take_labels(values)
            elif _are_states(name, values):
                self._decodes |= not shared
            elif not shared or (self._first and not name.startswith(_OF_DECODER)):
                self._take_mask(name, values)

    def _take_labels(self, values: Tensor) -> None:
        matrix = _as_matrix(values)
        if matrix is not None and not matrix.is_floating_point():
            self._labels = [_NamedMask(_LABELS, _up_to_last_label(matrix))]

    def _take_mask(self, name: str, values: Tensor) -> None:
        """Keep an argument whose name says what it marks, or that it may mark padding."""
        matrix = _as_matrix(values)
        if name in _MASKS:
            if matrix is not None:
                mask = _as_valid(matrix.detach().clone(), inverted=name in _PADDING)
                self._given.append(_NamedMask(name, mask))
        elif _UNREAD.search(name) and not _OTHER.search(name):
            lengths = values.ndim == 1 and not values.is_floating_point()
            if matrix is not None or lengths:
                self._unread[name] = (values if matrix is None else matrix).detach().clone()

    @torch.no_grad()
    def take_attention(self, role: str, sequences: int, mask: Tensor, *, are_scores: bool) -> None:
        """Keep which keys a call of attention hides from every query."""
        place = role, (sequences, mask.shape[-1])
        before = self._hidden.get(place)
        # On an accelerator, `any` would wait for the device.
        if before is not None and before.device.type == "cpu" and not before.any():
            return
        if self._leaves_none is None:  # only once, because it waits for the accelerator
            own = [given.valid for given in self._given if not given.of_keys]
            self._leaves_none = not all(valid.any() for valid in own)
        find = _hidden_from_others if self._leaves_none else hidden_keys
        hidden = find(mask, are_scores=are_scores).expand(*place[1])
        self._hidden[place] = hidden if before is None else before & hidden.to(before.device)

    def settle(self) -> None:
        """Start using the keys that attention hid, now that the pass is over."""
        self._over = True
        self._hidden = {place: hidden.cpu() for place, hidden in self._hidden.items()}

    def valid(self, shape: Shape, role: str = "", *, turned: bool = False) -> Tensor | None:
        """Return a mask of `shape`, False for padding, or None if nothing shows any padding.

        `role` is "key" for keys from another stack, with padding of their own; `turned` says that a
        square shape is [length, batch].
        """
        found = self._find(shape, role)
        if found is None:
            return None
        square = shape[0] == shape[1]
        return found.valid.T if found.valid.shape != shape or (square and turned) else found.valid

    def source(self, shape: Shape) -> str | None:
        """Return what shows the padding, such as the name of an argument, or None."""
        found = self._find(shape, "")
        return None if found is None else found.name

    def contradiction(self, shape: Shape) -> str | None:
        """Return an error text if a mask marks as tokens exactly what attention hides, else None.

        Rows sampled with such a mask are padding.
        """
        found = self._find(shape, "")
        hidden = None if found is None else self._hidden.get(("", tuple(found.valid.shape)))
        if found is None or hidden is None or not torch.equal(found.valid, hidden.cpu()):
            return None
        return _INVERTED.format(name=found.name)

    def notes(self, shape: Shape, stack: str) -> list[Note]:
        """Make the notes on padding for a reader of the numbers."""
        if (found := self._find(shape, "")) is not None:
            percent = 100 * float((~found.valid).float().mean())
            source = f", going by {found.name}" if found.name == HIDDEN_KEYS else ""
            text = "padding, {percent:.0f} % of the tokens, was left out{source}"
            numbers: dict[str, float | str] = {"percent": percent, "source": source}
            return [Note(NoteKind.PADDING, text, stack, numbers=numbers)] if percent > 0 else []
        empty = {x.name for x in self._given if _fits(x.valid, shape) and not x.of_keys}
        unread = [x for x, values in self._unread.items() if _may_pad(values, shape)]
        return [
            *(
                Note(NoteKind.MASK_WITHOUT_TOKENS, _EMPTY.format(name=name), stack, about=name)
                for name in sorted(empty - {*unread})
            ),
            *(
                Note(NoteKind.PADDING_MAY_COUNT, _MAY_COUNT.format(name=name), stack, about=name)
                for name in unread
            ),
        ]

    def _find(self, shape: Shape, role: str) -> _NamedMask | None:
        """Find the mask to use: the innermost module's mask comes first, the attention's last."""
        for given in (*reversed(self._given), *(self._labels if self._decodes else ())):
            if given.of_keys == (role == "key") and _fits(given.valid, shape):
                found = _NamedMask(given.name, given.valid.cpu())
                if self._says_something(found, role):
                    return found
        return self._find_hidden(shape, role) if self._over else None

    def _says_something(self, given: _NamedMask, role: str) -> bool:
        """Whether to use a mask.

        One without any token is ignored unless attention agrees by hiding every key from all other
        queries: when data run out, a rank may get a batch of padding only.
        """
        if given.name == _LABELS and given.valid.all():
            return False
        hidden = self._hidden.get((role, tuple(given.valid.shape))) if self._over else None
        return bool(given.valid.any() or (hidden is not None and hidden.all()))

    def _find_hidden(self, shape: Shape, role: str) -> _NamedMask | None:
        """Find the keys that attention hides.

        If each token sees only tokens before it, not itself, no query sees the last token; a single
        key hidden at the same place of all sequences is therefore not padding.
        """
        for each in (shape, shape[::-1]):
            hidden = self._hidden.get((role, each))
            if hidden is None or hidden.all():
                continue
            if not (hidden == hidden[:1]).all() or hidden[0].sum() > 1:
                return _NamedMask(HIDDEN_KEYS, ~hidden)
        return None


# -- arguments -----------------------------------------------------------------------------------


def named_tensors(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the named tensor arguments of a call, including those inside dicts.

    Positional arguments are left out if the `forward` lacks a signature.
    """
    given = kwargs
    if args:
        with ignored(TypeError, ValueError):
            given = {**_signature(module).bind_partial(*args).arguments, **kwargs}
    inner = [value for value in given.values() if isinstance(value, Mapping)]
    for name, value in [*given.items(), *(pair for held in inner for pair in held.items())]:
        plain = isinstance(value, Tensor) and not value.is_nested and not value.is_complex()
        if plain and isinstance(name, str):
            yield name, value


def _signature(module: nn.Module) -> inspect.Signature:
    """Return the signature of a module's `forward`, which is remembered for each class."""
    if "forward" in vars(module):
        return inspect.signature(module.forward)
    found = _signature_of(type(module).forward)
    return found.replace(parameters=[*found.parameters.values()][1:])


@functools.lru_cache(maxsize=64)
def _signature_of(forward: Any) -> inspect.Signature:
    return inspect.signature(forward)


def _as_matrix(values: Tensor) -> Tensor | None:
    """View [batch, length] or [batch, 1, 1, length] as [batch, length]; None for other shapes."""
    broadcast = values.ndim in (3, 4) and values.shape[1] == values.shape[-2] == 1
    matrix = values.flatten(0, -2) if broadcast else values
    return matrix if matrix.ndim == 2 else None


def _as_valid(mask: Tensor, *, inverted: bool) -> Tensor:
    """Convert a mask to False for padding; `inverted` masks are True there.

    A floating-point mask is added to scores, unless it contains 1 for tokens.
    """
    ones = not inverted and bool((mask > 0).any()) and not (mask < 0).any()
    if mask.is_floating_point() and not ones:
        return mask > _ADDED
    return ~mask.bool() if inverted else mask.bool()


def _up_to_last_label(labels: Tensor) -> Tensor:
    """Mark a decoder's tokens: all up to the last label, which is the next token."""
    kept = labels.detach() != _IGNORED
    follows = kept.flip(1).cumsum(dim=1).flip(1) > 0  # a label is here or follows
    return torch.cat([torch.ones_like(follows[:, :1]), follows[:, :-1]], dim=1)


def _are_states(name: str, values: Tensor) -> bool:
    """Whether an argument is the hidden states of another stack."""
    return name.startswith(_OF_MEMORY) and values.ndim == 3 and values.is_floating_point()


def _fits(matrix: Tensor, shape: Shape) -> bool:
    return matrix.shape in (shape, shape[::-1])


def _may_pad(values: Tensor, shape: Shape) -> bool:
    """Whether values differ and have the shape of all tokens, or one value per sequence."""
    fits = _fits(values, shape) or (values.ndim == 1 and len(shape) == 2 and len(values) in shape)
    return fits and len(values.unique()) > 1


# -- attention -----------------------------------------------------------------------------------


@torch.no_grad()
def hidden_keys(mask: Tensor, *, are_scores: bool = False) -> Tensor:
    """Find keys that a mask, or masked scores, hide from every query, [sequences (or 1), keys]."""
    if mask.is_floating_point():
        if are_scores or mask.shape[1] > 1:
            return mask.detach().amax(dim=(1, 2)) <= visibility.MASKED
        return visibility.hidden_keys(mask.detach()).all(dim=(1, 2))
    return ~mask.detach().bool().any(dim=(1, 2))


def _hidden_from_others(mask: Tensor, *, are_scores: bool) -> Tensor:
    """Find keys hidden from all other queries, because some masks let each token see itself."""
    if mask.shape[-2] != mask.shape[-1]:
        return hidden_keys(mask, are_scores=are_scores)
    hidden = visibility.hidden_keys(mask) if mask.is_floating_point() else ~mask.bool()
    own = torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
    return (hidden | own).all(dim=(1, 2))
