"""The views that a window is asked for, and what it must see for them."""

import functools
from collections.abc import Callable, Sequence

from geomon.capture.anatomy import Anatomy
from geomon.capture.snapshot import EMBEDDING, FINAL_NORM, source_of
from geomon.capture.tokens.sampling import MemoryLimit


class Wanted:
    """Captured views and further layers that are wanted, and what must be seen for them.

    Args:
        views: The views.
        extra_layers: Names of further layers (`geomon.capture.snapshot.EXTRA_LAYERS`).

    Attributes:
        views: The views.
        sources: Their sources.
        extra_layers: The further layers; none without hidden states.
        last: Whether the last token of each sequence is wanted.
        tokens: Whether token ids or positions are wanted.
        attention: Whether anything that attention or routing shows is wanted.
        operators: Whether operators must be seen: they show attention, and the path from embedding
            tables to the blocks.
    """

    def __init__(self, views: set[str], extra_layers: Sequence[str]) -> None:
        self.views, self.sources = views, {source_of(view) for view in views}
        self.extra_layers = tuple(extra_layers) if "hidden" in self.sources else ()
        self.last = "last" in self.sources
        by_token = not views.isdisjoint({"token_ids", "positions"})
        self.tokens = self.last or EMBEDDING in self.extra_layers or by_token
        self.attention = not self.sources.isdisjoint({"attention", "projection", "routing"})
        self.operators = self.attention or self.tokens

    @property
    def final_norm(self) -> bool:
        """Whether the final norm's output is wanted."""
        return FINAL_NORM in self.extra_layers

    def memory_limit(self, anatomy: Anatomy, max_mb: float | None) -> Callable[..., MemoryLimit]:
        """Return what makes the memory limit of a sampler.

        Args:
            anatomy: Anatomy of the model.
            max_mb: Largest memory in megabytes (10^6 bytes), or None for no limit.
        """
        layers = sum(len(stack.blocks) + 1 + self.final_norm for stack in anatomy.stacks)
        attentions = sum(max(1, len(block.attentions)) for block in anatomy.blocks)
        return functools.partial(
            MemoryLimit,
            max_mb,
            layers=2 * layers if self.last else layers,
            blocks=attentions if self.attention else 0,
        )
