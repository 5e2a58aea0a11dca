"""Anatomy: where the blocks of a model are, with their attentions and projections."""

from geomon.capture.anatomy.blocks import CROSS, Anatomy, Attention, Block, Stack, find_anatomy
from geomon.capture.anatomy.families import shown_name
from geomon.capture.anatomy.projections import find_sizes

__all__ = [
    "CROSS",
    "Anatomy",
    "Attention",
    "Block",
    "Stack",
    "find_anatomy",
    "find_sizes",
    "shown_name",
]
