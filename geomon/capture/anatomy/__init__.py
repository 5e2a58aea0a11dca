"""Anatomy: find the blocks of a model, with their attentions and projections."""

from geomon.capture.anatomy.blocks import (
    CROSS,
    Anatomy,
    Attention,
    Block,
    Stack,
    find_anatomy,
    join_anatomies,
)
from geomon.capture.anatomy.families import shown_name

__all__ = [
    "CROSS",
    "Anatomy",
    "Attention",
    "Block",
    "Stack",
    "find_anatomy",
    "join_anatomies",
    "shown_name",
]
