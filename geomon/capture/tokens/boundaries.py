"""Boundaries: to which sequence each token belongs, and its position there.

Packed batches hold several sequences per row, without padding. Attention separates them, but that
is seen only after the pass; positions that restart at 0 show it earlier. A name alone is not enough
to trust an argument.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.tokens.padding import named_tensors

# First positions of healthy models: 0, or one more than the padding token of RoBERTa's relatives.
_STARTS = (0, 1, 2)
_POSITIONS = re.compile(r"(^|_)pos(ition)?s?(_(ids?|index|indices|idx))?$", re.IGNORECASE)
# Places in an image: columns restart in each row.
_OF_A_PICTURE = re.compile(r"(^|_)(x|y|h|w|rows?|col(umn)?s?|height|width)(_|$)", re.IGNORECASE)


class GivenPlaces(NamedTuple):
    """An argument that may say where sequences begin.

    Attributes:
        name: Name of the argument.
        values: Positions, [batch (or 1), length] or [length].
    """

    name: str
    values: Tensor


class Sequences(NamedTuple):
    """The sequences that tokens belong to.

    Attributes:
        numbers: Index of each token's sequence, [batch, length], on the host.
        places: Position of each token in its sequence, [batch, length].
        source: Source of the boundaries, such as the name of an argument; "" if each row of the
            batch is one sequence.
    """

    numbers: Tensor
    places: Tensor
    source: str

    def view(self, shape: tuple[int, ...]) -> "Sequences":
        """View the tokens in another shape."""
        return Sequences(self.numbers.reshape(shape), self.places.reshape(shape), self.source)


@torch.no_grad()
def find_places(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[GivenPlaces]:
    """Find the arguments of a call that may say at which tokens sequences begin."""
    found = []
    for name, value in named_tensors(module, args, kwargs):
        if value.is_floating_point() or value.dtype == torch.bool:
            continue
        positions = _POSITIONS.search(name) and not _OF_A_PICTURE.search(name)
        if value.ndim in (1, 2) and positions:
            found.append(GivenPlaces(name, value.detach().clone()))
    return found


@torch.no_grad()
def find_sequences(
    given: Sequence[GivenPlaces], batch: int, length: int, valid: Tensor | None
) -> Sequences | None:
    """Find sequences in the rows of a batch from positions; None if every row holds only one.

    Positions count if each is 0 or one more than the one before it, and not all are 0.
    """
    for argument in given:
        begins = _begins(argument.values.cpu(), batch, length, valid)
        found = None if begins is None else sequences_from(begins, valid, argument.name)
        if found is not None:
            return found
    return None


class OddPlaces(NamedTuple):
    """Positions that no sequence from its beginning has.

    Attributes:
        name: Name of the argument.
        start: First position of the first row; None if positions repeat.
    """

    name: str
    start: int | None


@torch.no_grad()
def find_odd_places(
    given: Sequence[GivenPlaces], batch: int, length: int, valid: Tensor | None
) -> OddPlaces | None:
    """Find positions that start elsewhere than at 0, or repeat, in most rows of a batch."""
    tokens = torch.ones(batch, length, dtype=torch.bool, device="cpu")
    tokens = tokens if valid is None else valid.cpu().view(batch, length)
    both, half = tokens[:, 1:] & tokens[:, :-1], max(1, length // 2)
    for argument in given:
        values = _by_row(argument.values.cpu(), batch, length)
        if values is None or not both.any():
            continue
        # Rows of a picture repeat a position too, but not half of the row.
        same = (values[:, half:] == values[:, :-half])[tokens[:, half:] & tokens[:, :-half]]
        if same.double().mean() > 1 / 2:
            return OddPlaces(argument.name, None)
        steps = values.diff(dim=1)[both]
        # If rows begin with padding, either its positions or the tokens' begin at 0.
        first = values.gather(1, tokens.int().argmax(dim=1, keepdim=True)).flatten()
        begin = torch.stack([values[:, 0], first])[:, tokens.any(dim=1)]
        is_usual = torch.isin(begin, torch.tensor(_STARTS, device="cpu")).any()
        if (steps == 1).double().mean() > 1 / 2 and not is_usual:
            return OddPlaces(argument.name, int(begin[1, 0]))
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


def _begins(values: Tensor, batch: int, length: int, valid: Tensor | None) -> Tensor | None:
    """Find the first tokens of sequences, [batch, length]; None if the values do not show them."""
    found = _by_row(values, batch, length)
    if found is None:
        return None
    values = found
    begins = torch.zeros(batch, length, dtype=torch.bool, device="cpu")
    tokens = torch.ones_like(begins) if valid is None else valid.cpu()
    begins[:, 1:] = (values[:, 1:] == 0) & tokens[:, 1:]
    both = tokens[:, 1:] & tokens[:, :-1]
    follows = values[:, 1:] == values[:, :-1] + 1
    rising = (follows & both).any() and (follows | begins[:, 1:] | ~both).all()
    return begins if rising else None


def _by_row(values: Tensor, batch: int, length: int) -> Tensor | None:
    """Return positions as [batch, length]; None if they are of something else."""
    if values.shape[-1] != length or values.numel() not in (length, batch * length):
        return None
    return values.expand(batch, length)


def rows_as_sequences(shape: tuple[int, ...], *, length_first: bool) -> Sequences:
    """Number the tokens of a batch where each row, or feature map, is one sequence."""
    order = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu").view(shape)
    inner = math.prod(shape[1:])
    number, place = order // inner, order % inner
    return Sequences(place, number, "") if length_first else Sequences(number, place, "")


def last_tokens(sequences: Sequences, valid: Tensor | None, most: int) -> Tensor:
    """Find the last token of each sequence that is not padding, for at most `most` of them.

    Returns ascending flat indices. Sequences that are only padding have none.
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
