"""Views of hidden states: finite rows without padding, and what is known of their tokens."""

import functools
from typing import Any

import torch
from torch import Tensor

from geomon.capture.first_pass import StackPass
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
from geomon.capture.tokens.known_tokens import PACKED, ROUTED, KnownTokens, ShapeTokens
from geomon.capture.tokens.sampling import SampledRows
from geomon.note_kinds import NoteKind

HIDDEN_ONLY = sources_shared_by("rows")
_VIEWS = tuple(view for view in CAPTURED if source_of(view) in HIDDEN_ONLY)
# Views of rows alone, without another layer.
OWN_ROW_VIEWS = tuple(view for view in views_of("hidden") if view not in ADDITIONS)

_NO_TOKENS = "no embedding outside the blocks received integers of the hidden states' shape"
_FEWER_TOKENS = (
    "; one received fewer: some hidden states belong to no token of the text (virtual tokens of "
    "prompt tuning, for example), and they count as rows"
)
_LATER_STAGE = "only the first pipeline stage knows them, and its rows were not gathered"


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

    def of(
        self, depth: int, kept: SampledRows | None, why: str
    ) -> tuple[dict[str, Any], dict[str, str], Part]:
        """Make the captured views of hidden states, and the reasons for missing ones."""
        inverted = self._tokens.inverted_mask
        if kept is None or inverted is not None:
            reason = why if kept is None else inverted or ""
            return {}, dict.fromkeys(_VIEWS, reason), Part()
        tokens = self._tokens.of(kept.shape)
        for kind, remark in tokens.remarks:
            self._remarks.add(kind, HIDDEN, depth, remark)
        parts: dict[str, SampledRows | str] = {"": kept.at(*tokens.among(kept.indices))}
        if self._keeps_last and "last" in sources_of(kept):
            parts[LAST] = tokens.last_of(kept)
        captured, missing = dict[str, Any](), dict[str, str]()
        orders = dict[str, Tensor | None]()
        for prefix, rows in parts.items():
            if isinstance(rows, str):
                missing |= {prefix + view: rows for view in OWN_ROW_VIEWS}
                continue
            subject = "last tokens" if prefix else HIDDEN
            found, lacking, orders[prefix] = self._views_of(depth, rows, tokens, subject)
            captured |= {prefix + view: value for view, value in found.items()}
            missing |= {prefix + view: why for view, why in lacking.items()}
        elsewhere = self._pass.stack.before > 0
        part = Part(orders[""], orders.get(LAST), kept.start, tokens_elsewhere=elsewhere)
        return captured, missing, part

    def _views_of(
        self, depth: int, kept: SampledRows, tokens: ShapeTokens, subject: str
    ) -> tuple[dict[str, Any], dict[str, str], Tensor | None]:
        """Make the captured views of finite rows, the reasons for missing ones, and row numbers.

        Row numbers are returned only if ranks share the rows.
        """
        finite = kept.values.isfinite().all(dim=1).cpu()
        if not finite.all():
            self._remarks.lose(subject, depth, int((~finite).sum()), len(finite))
            kept = kept.at(finite.nonzero().squeeze(1))
        if tokens.is_routed:
            self._remarks.add(NoteKind.ROUTED, subject, depth, ROUTED)
        precision = torch.finfo(self._pass.selection.dtype).eps
        captured: dict[str, Any] = {"hidden": kept.values, "precision": precision}
        captured |= {} if kept.additions is None else {"additions": kept.additions}
        found = {
            "positions": (tokens.positions(kept.indices), ROUTED),
            "sequences": (tokens.numbers(kept.indices), PACKED),
            "token_ids": (tokens.token_ids(kept.indices), self._no_ids),
        }
        captured |= {view: values for view, (values, _) in found.items() if values is not None}
        missing = {view: why for view, (values, why) in found.items() if values is None}
        return captured, missing, tokens.order(kept.indices) if self._pass.is_part else None

    @functools.cached_property
    def _no_ids(self) -> str:
        """The reason why token ids are missing."""
        if self._pass.stack.before:
            return _LATER_STAGE
        # With several stacks, the integers may belong to another one.
        fewer = self._alone and self._tokens.ids.fewer_than(self._pass.shape)
        return _NO_TOKENS + _FEWER_TOKENS if fewer else _NO_TOKENS


def sources_of(kept: SampledRows | None) -> frozenset[str]:
    """Return the sources of hidden states; feature maps do not have a last token."""
    return HIDDEN_ONLY - ({"last"} if kept is not None and len(kept.shape) > 2 else set())
