"""Padding masks among a module's arguments, whatever they are called there."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# True or 1 where there is a token.
_TOKENS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
# True or -inf where there is none.
_PADDING = (
    "key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask",
    "encoder_padding_mask",
)  # fmt: skip
# Of what a decoder looks at, and not of its own tokens.
OF_MEMORY = ("memory", "encoder")

NAMES = (*_TOKENS, *_PADDING)

_ADDED = -1.0  # an additive mask is 0 where there is a token and far below where there is none


@torch.no_grad()
def padding_masks(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The masks [batch, length] among the arguments of a call, False where there is padding.

    Args:
        module: The one that is called; its signature names positional arguments.
        args: Positional arguments.
        kwargs: Arguments by name.
    """
    given = _named(module, args, kwargs)
    found = {}
    for name in NAMES:
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_nested:
            found[name] = _valid(mask.detach().clone(), inverted=name in _PADDING)
    return found


def _valid(mask: Tensor, *, inverted: bool) -> Tensor:
    if mask.is_floating_point() and (inverted or not _says_yes(mask)):
        return mask > _ADDED
    return ~mask.bool() if inverted else mask.bool()


def _says_yes(mask: Tensor) -> bool:
    """Whether a floating mask is of ones for tokens, and not of what is added to scores."""
    return bool((mask > 0).any()) and not bool((mask < 0).any())


def _named(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    if not args:
        return kwargs
    try:
        return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments | dict(
            kwargs
        )
    except (TypeError, ValueError):
        return kwargs
