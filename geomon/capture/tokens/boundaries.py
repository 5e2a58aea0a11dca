"""Boundaries: which sequence each token is of, and where it stands there.

Packed batches have several sequences behind one another in a row, no padding and no mask by which
it could be seen. Their calls say it otherwise: positions that begin anew, or lengths that are
summed up. Neither is taken by its name alone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.tokens.padding import named_tensors

_POSITIONS = re.compile(r"(^|_)pos(ition)?s?(_(ids?|index|indices|idx))?$", re.IGNORECASE)
# Places in a picture: columns begin anew in each row.
_OF_A_PICTURE = re.compile(r"(^|_)(x|y|h|w|rows?|col(umn)?s?|height|width)(_|$)", re.IGNORECASE)
_SUMMED_LENGTHS = re.compile(r"cu_?seq_?len|cu_?len", re.IGNORECASE)


class GivenPlaces(NamedTuple):
    """An argument that may say where sequences begin.

    Attributes:
        name: Name of the argument.
        values: Its values: positions, [batch (or 1), length] or [length], or the places at which
            sequences begin and the last one ends, [sequences + 1].
        summed: Whether they are such places.
    """

    name: str
    values: Tensor
    summed: bool


class Sequences(NamedTuple):
    """The sequences that tokens are of.

    Attributes:
        numbers: Number of the sequence that each token is of, [batch, length], on the host.
        places: Position of each token in its sequence, of the same shape.
        source: What the boundaries are known by, the name of an argument, say; "" where each row of
            the batch is one sequence.
    """

    numbers: Tensor
    places: Tensor
    source: str


@torch.no_grad()
def find_places(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[GivenPlaces]:
    """Find the arguments of a call that may say where sequences begin."""
    found = []
    for name, value in named_tensors(module, args, kwargs):
        if value.is_floating_point() or value.dtype == torch.bool:
            continue
        summed = bool(_SUMMED_LENGTHS.search(name))
        positions = _POSITIONS.search(name) and not _OF_A_PICTURE.search(name)
        if (value.ndim == 1 and summed) or (value.ndim in (1, 2) and positions):
            found.append(GivenPlaces(name, value.detach().clone(), summed))
    return found


@torch.no_grad()
def find_sequences(
    given: Sequence[GivenPlaces], batch: int, length: int, valid: Tensor | None
) -> Sequences | None:
    """Decide where sequences begin in the rows of a batch.

    Positions count if each is one more than that before it, or 0, and not all are 0. Summed
    lengths count if they grow from 0 to the number of all tokens.

    None if nothing says that a row holds several.
    """
    for argument in given:
        begins = _begins(argument, batch, length, valid)
        found = None if begins is None else sequences_from(begins, valid, argument.name)
        if found is not None:
            return found
    return None


def sequences_from(begins: Tensor, valid: Tensor | None, source: str) -> Sequences | None:
    """Number the sequences in the rows of a batch; None if no row holds several."""
    begins = begins.clone()
    begins[:, 0] = True
    numbers = begins.flatten().cumsum(dim=0).view(begins.shape) - 1
    tokens = torch.ones_like(begins) if valid is None else valid.cpu()
    last = torch.where(tokens, numbers, -1).amax(dim=1)
    if not (tokens & (numbers < last[:, None])).any():
        return None
    order = torch.arange(begins.numel(), dtype=torch.int64, device="cpu")
    starts = torch.where(begins.flatten(), order, 0).cummax(dim=0).values
    return Sequences(numbers, (order - starts).view(begins.shape), source)


def _begins(argument: GivenPlaces, batch: int, length: int, valid: Tensor | None) -> Tensor | None:
    """Find the first tokens of sequences, [batch, length]; None if the values do not say it."""
    values = argument.values.cpu()
    begins = torch.zeros(batch * length + 1, dtype=torch.bool, device="cpu")
    if argument.summed:
        places = values.long()
        ends = places[:1].tolist() == [0] and places[-1:].tolist() == [batch * length]
        if not ends or (places.diff() < 0).any():
            return None
        begins[places] = True
        return begins[:-1].view(batch, length)
    if values.shape[-1] != length or values.numel() not in (length, batch * length):
        return None
    values, begins = values.expand(batch, length), begins[:-1].view(batch, length)
    tokens = torch.ones_like(begins) if valid is None else valid.cpu()
    begins[:, 1:] = (values[:, 1:] == 0) & tokens[:, 1:]
    both = tokens[:, 1:] & tokens[:, :-1]
    follows = values[:, 1:] == values[:, :-1] + 1
    rising = (follows & both).any() and (follows | begins[:, 1:] | ~both).all()
    return begins if rising else None


def rows_as_sequences(shape: tuple[int, ...], *, length_first: bool) -> Sequences:
    """Number the tokens of a batch in which each row, or feature map, is one sequence."""
    order = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu").view(shape)
    inner = math.prod(shape[1:])
    number, place = order // inner, order % inner
    return Sequences(place, number, "") if length_first else Sequences(number, place, "")


def last_tokens(sequences: Sequences, valid: Tensor | None, most: int) -> Tensor:
    """Find the last token of each sequence that is no padding.

    Args:
        sequences: The sequences, of any shape.
        valid: False where there is padding, of the same shape; None without padding.
        most: Largest number of sequences of which it is found, evenly spread.

    Returns:
        Flat indices, ascending; none of sequences that are padding alone.
    """
    numbers = sequences.numbers.flatten()
    places = torch.arange(len(numbers), dtype=torch.int64, device="cpu")
    if valid is not None:
        places = places[valid.cpu().flatten()]
    last = numbers.bincount().fill_(-1)
    last.scatter_reduce_(0, numbers[places], places, "amax")
    last = last[last >= 0]
    kept = min(len(last), most)
    chosen = torch.arange(kept, dtype=torch.int64, device="cpu") * len(last) // kept
    return last[chosen].sort().values
