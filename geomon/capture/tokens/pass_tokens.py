"""Tokens of one pass through a stack, while it runs: what shows them, and which are kept."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from geomon.capture.storage import Shape
from geomon.capture.tokens.boundaries import GivenPlaces, find_places
from geomon.capture.tokens.known_tokens import KnownTokens
from geomon.capture.tokens.padding import Padding
from geomon.capture.tokens.sampling import RowSampler
from geomon.capture.tokens.token_ids import TokenIds, checksum, no_positions


class PassTokens:
    """The tokens of one pass through a stack, while it runs.

    Args:
        sampler: Sampler of the rows.
        padding: Padding of the stack.
        length_first: Whether the modules take hidden states as [length, batch, width].

    Attributes:
        ids: The token ids.
        padding: The padding.
        shape: Shape of the hidden states that entered the first block, without the width.
        landmarks: Rows at fixed places of these hidden states, [rows, width].
    """

    def __init__(self, sampler: RowSampler, padding: Padding, *, length_first: bool) -> None:
        self._sampler = sampler
        self._by_modules = length_first
        self._given: list[GivenPlaces] = []  # in the order seen
        self.padding = padding
        self.ids = TokenIds()
        self.forget_states()

    def forget_states(self) -> None:
        """Forget the hidden states, because another pass begins with the same arguments."""
        self.ids.forget_states()
        self.padding.forget_attention()
        self.shape: Shape = ()
        self.landmarks: Tensor | None = None
        self._begins: Tensor | None = None  # tokens that begin a sequence, in one packed row
        self._kept: dict[tuple[Shape, str], Tensor] = {}
        self._ends: dict[Shape, Tensor] = {}

    def take_arguments(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        shared: bool = False,
    ) -> None:
        """Keep the arguments of a call that mark padding or the beginnings of sequences."""
        self.padding.take_arguments(module, args, kwargs, shared=shared)
        if not shared:
            self._given += find_places(module, args, kwargs)

    def take_begins(self, length: int, find: Callable[[int], Tensor]) -> None:
        """Keep the starts of packed sequences in the stack's single row."""
        if self._begins is None and math.prod(self.shape) == length:
            self._begins = find(length)

    def begin(self, shape: Shape) -> None:
        """Remember the shape of the first hidden states, without the width."""
        self.shape = shape
        self.ids.begin()

    def known(self) -> KnownTokens:
        """Return what is known by now."""
        return KnownTokens(
            self.shape, self._sampler, self.ids, self.padding, self._given[::-1],
            by_modules=self._by_modules, ends=self._ends,
        )  # fmt: skip

    def settle(self, attended: Iterable[Shape], is_routed: Callable[[Shape], bool]) -> KnownTokens:
        """Return what is known after the pass.

        Args:
            attended: [batch, queries] of each attention.
            is_routed: Whether a layer of a shape saw only tokens that were routed to it.
        """
        self.padding.settle()
        known = self.known()
        return replace(known, attended=[*attended], begins=self._begins, is_routed=is_routed)

    @property
    def length_first(self) -> bool:
        """Whether hidden states are [length, batch, width], as far as known."""
        return self.known().length_first

    def rows(self, shape: Shape, role: str = "") -> Tensor:
        """Return flat indices of the sampled rows, equal for all tensors of one shape and role."""
        if (shape, role) not in self._kept:
            valid = self.known().of(shape, role).valid
            self._kept[shape, role] = self._sampler.sample_rows(torch.Size(shape), valid)
        return self._kept[shape, role]

    def last(self, shape: Shape) -> Tensor | None:
        """Return flat indices of the last token of each sequence, as far as known during the pass.

        None if the hidden states are not sequences. At most as many sequences as sampled rows
        count.
        """
        tokens = self.known().of(shape)
        are_maps = len(shape) > 2 and tokens.packed is None
        if shape not in self._ends and tokens.sequences is not None and not are_maps:
            self._ends[shape] = tokens.last
        return self._ends.get(shape)

    @property
    def checksum(self) -> str:
        """Text that differs between passes over different tokens; "" if nothing was seen.

        Integers of tables may be positions, equal in every batch. They suffice only if they
        outnumber the hidden states, so that this rank has a part of these.
        """
        if self.landmarks is None:
            return ""
        known, count = self.ids.checksum(), math.prod(self.shape)
        if any(lookup.ids.numel() > count for lookup in self.ids.lookups):
            return known
        rows = self.landmarks.cpu().float().contiguous()
        return f"{known} {zlib.crc32(rows.numpy().tobytes()):08x}"

    @property
    def ids_checksum(self) -> str:
        """Checksum of the token ids; "" if they are unknown, or may be positions."""
        found = self.ids.find(self.shape) if self.shape else None
        return "" if found is None or not no_positions(found.lookup) else checksum(found.lookup)
