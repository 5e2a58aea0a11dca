"""Views of hidden states: finite rows without padding, and what is known of their tokens."""

from typing import Any

import torch
from torch import Tensor

from geomon.capture.first_pass import Shape, StackPass
from geomon.capture.remarks import HIDDEN, LayerRemarks
from geomon.capture.snapshot import (
    ADDITIONS,
    CAPTURED,
    LAST,
    Part,
    source_of,
    sources_shared_by,
    views_of,
)
from geomon.capture.tokens.pass_tokens import KnownTokens, once
from geomon.capture.tokens.sampling import SampledRows
from geomon.note_kinds import NoteKind

HIDDEN_ONLY = sources_shared_by("rows")
# Views of rows alone, without another layer.
OWN_ROW_VIEWS = tuple(view for view in views_of("hidden") if view not in ADDITIONS)

_ROUTED = (
    "the block received fewer tokens than other blocks (tokens may be routed past it): it is not "
    "known which tokens of the sequence these are"
)
_NO_TOKENS = "no embedding outside the blocks received integers of the hidden states' shape"
_FEWER_TOKENS = (
    "; one received fewer: some hidden states belong to no token of the text (virtual tokens of "
    "prompt tuning, for example), and they count as rows"
)
_LATER_STAGE = "only the first pipeline stage knows them, and its rows were not gathered"
_PACKED = "the hidden states are [tokens, width]: the boundaries between sequences are unknown"
_LAST_UNKNOWN = (
    "it became known only after the pass which token is the last of its sequence: pass the model a "
    "mask [batch, length] as attention_mask"
)
_ENDS_LATE = (
    "the hidden states are [tokens, width]: only the attention that follows shows where a sequence "
    "ends, after the rows were kept"
)


class RowViews:
    """Makes the views of hidden states of one stack.

    Args:
        stack_pass: The pass.
        tokens: The known facts about its tokens.
        remarks: Takes remarks on the layers.
        keeps_last: Whether the last token of each sequence is wanted.
        alone: Whether the stack is the only one that was watched.
    """

    def __init__(
        self, stack_pass: StackPass, tokens: KnownTokens, remarks: LayerRemarks, *,
        keeps_last: bool, alone: bool,
    ) -> None:  # fmt: skip
        self._pass, self._tokens, self._remarks = stack_pass, tokens, remarks
        self._keeps_last, self._alone = keeps_last, alone
        self._answers: dict[tuple[Any, ...], Any] = {}  # shared by layers with equal rows

    def of(
        self, depth: int, kept: SampledRows | None, why: str
    ) -> tuple[dict[str, Any], dict[str, str], Part]:
        """Make the captured views of hidden states, and the reasons for missing ones."""
        inverted = self._tokens.inverted_mask
        if kept is None or inverted is not None:
            wanted = (view for view in CAPTURED if source_of(view) in HIDDEN_ONLY)
            reason = why if kept is None else inverted or ""
            return {}, dict.fromkeys(wanted, reason), Part()
        kept = self._pass.without_padding(kept, self._tokens)
        for kind, remark in self._tokens.remarks(kept.shape):
            self._remarks.add(kind, HIDDEN, depth, remark)
        captured, missing, rows = self._views_of(depth, kept, HIDDEN)
        last_rows = None
        if self._keeps_last and "last" in sources_of(kept):
            last = self._last_tokens(kept)
            if isinstance(last, str):
                missing |= {LAST + view: last for view in OWN_ROW_VIEWS}
            else:
                more, lacking, last_rows = self._views_of(depth, last, "last tokens")
                captured |= {LAST + view: value for view, value in more.items()}
                missing |= {LAST + view: why for view, why in lacking.items()}
        part = Part(rows, last_rows, kept.start, tokens_elsewhere=self._pass.stack.before > 0)
        return captured, missing, part

    def _last_tokens(self, kept: SampledRows) -> SampledRows | str:
        """Return the last tokens, now that padding is known, or the reason why there are none."""
        if self._pass.is_routed(kept.shape):
            return _ROUTED
        if kept.last is None:
            return _PACKED if self._tokens.packed(kept.shape) is None else _ENDS_LATE
        places = self._tokens.last_of(kept.shape, self._pass.tokens.max_rows)
        among, indices = self._among(kept.last.indices, places)
        if len(among) < len(places) and not kept.last.start:
            return _LAST_UNKNOWN
        return kept.last.at(among, indices)

    @once
    def _among(self, indices: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Find which of some rows are at given places, and their indices."""
        among = torch.isin(indices, places).nonzero().squeeze(1)
        return among, indices[among]

    def _views_of(
        self, depth: int, kept: SampledRows, subject: str
    ) -> tuple[dict[str, Any], dict[str, str], Tensor | None]:
        """Make the captured views of finite rows, the reasons for missing ones, and row numbers.

        Row numbers are returned only if ranks share the rows.
        """
        finite = kept.values.isfinite().all(dim=1).cpu()
        if not finite.all():
            self._remarks.lose(subject, depth, int((~finite).sum()), len(finite))
            kept = kept.at(finite.nonzero().squeeze(1))
        captured, missing, rows = self._facts_of(kept.indices, kept.shape)
        if "positions" in missing:
            self._remarks.add(NoteKind.ROUTED, subject, depth, missing["positions"])
        rest = {"hidden": kept.values, "precision": torch.finfo(self._pass.selection.dtype).eps}
        rest |= {} if kept.additions is None else {"additions": kept.additions}
        return rest | captured, dict(missing), rows

    @once
    def _facts_of(
        self, indices: Tensor, shape: Shape
    ) -> tuple[dict[str, Any], dict[str, str], Tensor | None]:
        """Make the views of the tokens of some rows, which layers with these rows share."""
        tokens, routed = self._tokens, self._pass.is_routed(shape)
        ids = tokens.ids.find(shape)
        found = {
            "positions": None if routed else tokens.positions(indices, shape),
            "sequences": tokens.numbers(indices, shape),
            "token_ids": ids and ids.arrange(ids.lookup.ids).flatten().cpu()[indices],
        }
        # With several stacks, the integers may belong to another one.
        fewer = ids is None and self._alone and tokens.ids.fewer_than(self._pass.shape)
        unknown = _NO_TOKENS + _FEWER_TOKENS if fewer else _NO_TOKENS
        no_ids = _LATER_STAGE if self._pass.stack.before else unknown
        why = {"positions": _ROUTED, "sequences": _PACKED, "token_ids": no_ids}
        captured = {view: value for view, value in found.items() if value is not None}
        missing = {view: why[view] for view in found if view not in captured}
        rows = self._pass.tokens.number(indices, shape) if self._pass.is_part else None
        return captured, missing, rows


def sources_of(kept: SampledRows | None) -> frozenset[str]:
    """Return the sources of hidden states; feature maps do not have a last token."""
    return HIDDEN_ONLY - ({"last"} if kept is not None and len(kept.shape) > 2 else set())
