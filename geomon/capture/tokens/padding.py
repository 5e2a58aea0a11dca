"""Padding: which tokens of a batch are none, and by what that is known.

A mask under a name of transformers or of torch counts as it is given, before anything is sampled.
What else may show padding is only known when the pass is over: which keys attention hides from
every query, masks under other names, and labels of -100. A 0/1 argument is not taken for a mask
without evidence: labels, segments and prompts have the same form.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.anatomy import CROSS, Anatomy
from geomon.capture.tokens import visibility

# Arguments that are True or 1 where there is a token.
_TOKENS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
# Arguments that are True or -inf where there is none.
_PADDING = (
    "key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask",
    "encoder_padding_mask",
)  # fmt: skip
_MASKS = (*_TOKENS, *_PADDING)
# Beginnings of the names of masks over what a decoder attends to, not over its own tokens.
OF_MEMORY = ("memory", "encoder")
# The same over a decoder's own tokens.
OF_DECODER = ("tgt", "decoder", "trg", "target")

# Names that masks of padding have elsewhere, and words in them that say something else.
_MASK_NAME = re.compile(r"mask|pad|valid", re.IGNORECASE)
_OTHER_MASK = re.compile(
    r"loss|label|prompt|completion|answer|segment|type|causal|special|mlm|masked|future|subseq",
    re.IGNORECASE,
)
_LABEL_NAME = re.compile(r"label|target", re.IGNORECASE)

_ADDED = -1.0  # an additive mask is 0 where there is a token and far below where there is none
_IGNORED = -100  # the label that torch's cross-entropy ignores

HIDDEN_KEYS = "the keys that attention hides from every query"

# Runs of one token id at the ends of sequences look like padding from this length on, if the id is
# elsewhere at most once in a sequence: text has shorter runs, of ids that it is full of.
_SHORTEST_RUN = 4


class GivenMask(NamedTuple):
    """An argument that may say where padding is.

    Attributes:
        name: Name of the argument.
        values: Its values, [batch, length].
        shared: Whether a module around several stacks was given it.
    """

    name: str
    values: Tensor
    shared: bool


class Padding(NamedTuple):
    """Padding, and the evidence for it.

    Attributes:
        valid: False where there is padding, [batch, length], bool, on the host.
        source: What it is known by, in words: the name of an argument, say.
    """

    valid: Tensor
    source: str


# -- arguments -----------------------------------------------------------------------------------


@torch.no_grad()
def find_padding_masks(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Find the padding masks among the arguments of a call whose names say what their values mean.

    Args:
        module: The module that is called; its signature names positional arguments.
        args: Positional arguments.
        kwargs: Arguments by name.

    Returns:
        Masks [batch, length] by the name of the argument, False where there is padding.
    """
    return {
        name: _as_valid(mask.detach().clone(), inverted=name in _PADDING)
        for name, mask in _matrices(module, args, kwargs)
        if name in _MASKS
    }


@torch.no_grad()
def find_possible_masks(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, shared: bool
) -> list[GivenMask]:
    """Find the arguments of a call that may say where padding is, under any other name.

    Args:
        module: The module that is called; its signature names positional arguments.
        args: Positional arguments.
        kwargs: Arguments by name.
        shared: Whether the module is around several stacks.
    """
    return [
        GivenMask(name, values.detach().clone(), shared)
        for name, values in _matrices(module, args, kwargs)
        if name not in _MASKS
        and (values.dtype == torch.bool or _is_mask_name(name) or _LABEL_NAME.search(name))
    ]


def padding_arguments(anatomy: Anatomy) -> tuple[list[str], list[str]]:
    """List the names of the arguments by which the modules around the blocks take padding masks.

    Masks over what a decoder attends to count only in a model with cross-attention.

    Args:
        anatomy: Anatomy of the model.

    Returns:
        Names whose meaning is known, and names that may be those of a padding mask.
    """
    names: dict[str, None] = {}
    for stack in anatomy.stacks:
        for module in stack.above:
            names |= dict.fromkeys(inspect.signature(module.forward).parameters)
    crossing = any(block.attention_index(CROSS) is not None for block in anatomy.blocks)
    known = [name for name in names if name in _MASKS]
    return (
        [name for name in known if crossing or not name.startswith(OF_MEMORY)],
        [name for name in names if name not in _MASKS and _is_mask_name(name)],
    )


def _is_mask_name(name: str) -> bool:
    return bool(_MASK_NAME.search(name)) and not _OTHER_MASK.search(name)


def _matrices(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over arguments [batch, length] and [batch, 1, 1, length], also those of one dict."""
    given = arguments_by_name(module, args, kwargs)
    inner = [value for value in given.values() if isinstance(value, Mapping)]
    for name, value in [*given.items(), *(pair for held in inner for pair in held.items())]:
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_nested:
            continue
        broadcast = value.ndim in (3, 4) and value.shape[1] == value.shape[-2] == 1
        matrix = value.flatten(0, -2) if broadcast else value
        if matrix.ndim == 2 and not matrix.is_complex():
            yield name, matrix


def arguments_by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Name all arguments of a call; positional ones are lost where there is no signature.

    Args:
        module: The module that is called.
        args: Positional arguments.
        kwargs: Arguments by name.
    """
    if not args:
        return kwargs
    try:
        return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments | dict(
            kwargs
        )
    except (TypeError, ValueError):
        return kwargs


def _as_valid(mask: Tensor, *, inverted: bool) -> Tensor:
    """Convert a mask to False where there is padding; `inverted` masks are True there."""
    if mask.is_floating_point() and (inverted or not _is_ones_for_tokens(mask)):
        return mask > _ADDED
    return ~mask.bool() if inverted else mask.bool()


def _is_ones_for_tokens(mask: Tensor) -> bool:
    """Whether a floating-point mask has ones for tokens, and is not added to scores."""
    return bool((mask > 0).any()) and not bool((mask < 0).any())


# -- attention -----------------------------------------------------------------------------------


@torch.no_grad()
def hidden_keys(mask: Tensor) -> Tensor:
    """Find the keys that a mask, or masked scores, hide from every query of every head.

    Args:
        mask: [sequences (or 1), heads (or 1), queries (or 1), keys]: True or 1 where a query sees a
            key, or additive; or masked scores.

    Returns:
        True for a hidden key, [sequences (or 1), keys].
    """
    if mask.is_floating_point():
        if mask.shape[1] > 1:  # scores of every head: only what no score reaches is sure
            return mask.detach().amax(dim=(1, 2)) <= visibility.MASKED
        return visibility.hidden_keys(mask.detach()).all(dim=2).all(dim=1)
    return ~mask.detach().bool().any(dim=1).any(dim=1)


# -- evidence ------------------------------------------------------------------------------------


@torch.no_grad()
def infer_padding(
    given: Sequence[GivenMask],
    ids: Tensor | None,
    hidden: Tensor | None,
    *,
    first: bool = True,
) -> Padding | None:
    """Decide which tokens are padding, by the evidence of one pass.

    In this order: keys that attention hides from every query; labels of -100 behind the last
    label, where the token ids are those of the labels; an argument under the name of a mask in
    which the tokens of every sequence are side by side, and under which all token ids outside are
    one id.

    Args:
        given: Arguments that may be masks, [batch, length] each, the one that counts most first.
        ids: Token ids, [batch, length]; None where there are none.
        hidden: True for keys that attention hides from every query, [batch, length]; None where no
            attention was seen.
        first: Whether the stack is the first one of the model, to which an argument of the whole
            model belongs.

    Returns:
        The padding; None where nothing says that there is any.
    """
    ids = None if ids is None else ids.cpu()
    masks = [(mask, values) for mask in given if (values := _as_flags(mask)) is not None]
    if hidden is not None and bool(hidden.any()):
        hidden = hidden.cpu()
        for mask, values in masks:
            if torch.equal(values, hidden) or torch.equal(values, ~hidden):
                return Padding(~hidden, mask.name)
        if _are_side_by_side(~hidden) and _is_of_sequences(hidden, ids):
            return Padding(~hidden, HIDDEN_KEYS)
    for mask in given if ids is not None else ():
        valid = None if ids is None else _by_labels(mask, ids)
        if valid is not None:
            return Padding(valid, f"{mask.name} of {_IGNORED}")
    for mask, values in masks:
        valid = _by_form(mask, values, ids, needs_ids=mask.shared and not first)
        if valid is not None:
            return Padding(valid, mask.name)
    return None


@torch.no_grad()
def end_runs(ids: Tensor) -> Tensor | None:
    """Find runs of one token id at the ends of sequences of unequal length: padding, by its looks.

    Args:
        ids: Token ids, [batch, length].

    Returns:
        False in the runs, [batch, length]; None where there are no such runs.
    """
    ids = ids.cpu()
    for flipped in (ids.flip(1), ids):
        last = flipped[:, 0].mode().values
        runs = (flipped == last).cumprod(dim=1).bool()
        lengths = runs.sum(dim=1)
        elsewhere = int((flipped == last).sum() - lengths.sum())
        unequal = int(lengths.min()) < int(lengths.max())
        if unequal and int(lengths.max()) >= _SHORTEST_RUN and elsewhere <= len(ids):
            return ~(runs.flip(1) if flipped is not ids else runs)
    return None


def _as_flags(mask: GivenMask) -> Tensor | None:
    """Convert an argument to True and False; None where it is no 0/1 or additive mask, or one."""
    values = mask.values.cpu()
    if values.dtype != torch.bool:
        low, high = values.min(), values.max()
        if (
            values.is_floating_point()
            and float(high) == 0.0
            and float(low) <= -visibility.FAR_BELOW
        ):
            values = values > -visibility.FAR_BELOW
        elif (
            float(low) == 0.0 and float(high) == 1.0 and bool(((values == 0) | (values == 1)).all())
        ):
            values = values.bool()
        else:
            return None
    return None if bool(values.all()) or not bool(values.any()) else values


def _by_labels(mask: GivenMask, ids: Tensor) -> Tensor | None:
    """Find padding behind the last label of each sequence; None where the labels are not the ids'.

    A decoder that makes its inputs of the labels shifts them by one.
    """
    labels = mask.values.cpu()
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.shape != ids.shape:
        return None
    kept = labels != _IGNORED
    if bool(kept.all()) or not bool(kept.any()):
        return None
    behind = kept.flip(1).cumsum(dim=1).flip(1) > 0  # a label is here or follows
    if torch.equal(ids[:, 1:][kept[:, :-1]], labels[:, :-1][kept[:, :-1]]):
        valid = torch.cat([torch.ones_like(behind[:, :1]), behind[:, :-1]], dim=1)
    elif torch.equal(ids[kept], labels[kept]):
        valid = behind
    else:
        return None
    return valid if _is_one_id(ids, valid) else None


def _by_form(
    mask: GivenMask, values: Tensor, ids: Tensor | None, *, needs_ids: bool
) -> Tensor | None:
    """Find padding by the name and the form of an argument, and the token ids under it."""
    if not _is_mask_name(mask.name) or (needs_ids and ids is None):
        return None
    padding_is_true = "pad" in mask.name.lower()
    for valid in (~values, values) if padding_is_true else (values, ~values):
        lengths = valid.sum(dim=1)
        triangle = len(valid) == valid.shape[1] > 1 and len(lengths.unique()) == len(lengths)
        if (
            bool((lengths > 0).all())
            and not triangle  # a causal mask
            and _are_side_by_side(valid)
            and (ids is None or _is_one_id(ids, valid))
        ):
            return valid
    return None


def _is_one_id(ids: Tensor, valid: Tensor) -> bool:
    """Whether there is padding, and all token ids there are the same."""
    outside = ids[~valid]
    return len(outside) > 0 and bool((outside == outside[0]).all())


def _is_of_sequences(hidden: Tensor, ids: Tensor | None) -> bool:
    """Whether hidden keys are of the sequences, and not of the mask: strictly causal, say.

    What is hidden at the same places of all sequences is padding where it is one token id, or, in
    the absence of token ids, several tokens.
    """
    if bool((hidden != hidden[:1]).any()):
        return True
    return int(hidden[0].sum()) > 1 if ids is None else _is_one_id(ids, ~hidden)


def _are_side_by_side(valid: Tensor) -> bool:
    """Whether the tokens of each sequence have no padding between them."""
    begins = valid[:, 1:] & ~valid[:, :-1]
    return bool((begins.sum(dim=1) + valid[:, 0] <= 1).all())
