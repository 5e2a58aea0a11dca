"""Capture: watch one forward pass, and keep sampled rows of each layer as a `Snapshot`."""

from geomon.capture.anatomy import CROSS, Anatomy, Attention, Block, Stack, find_anatomy, shown_name
from geomon.capture.calling.calls import FirstCall, in_cuda_graph
from geomon.capture.calling.probe import extra_pass
from geomon.capture.model_parts import ModelParts
from geomon.capture.modes import unseen, without_modes
from geomon.capture.shards import TensorPlace
from geomon.capture.snapshot import (
    CAPTURED,
    HOST,
    LAST,
    OF_THE_BATCH,
    SOURCES,
    Layer,
    MeanLoss,
    NotSeenError,
    Part,
    PassInfo,
    Snapshot,
    at_places,
    check_extra_layers,
    concat_heads,
    explain_missing,
    note_on_layers,
    query_places,
    queue_copy,
    source_of,
    sources_shared_by,
    views_of,
    whole_sequences,
)
from geomon.capture.tap import Plans
from geomon.capture.tokens.sampling import ATTENTION_QUERIES, derive_seed
from geomon.capture.unchanged import extra_passes, random_states_kept
from geomon.capture.window import Window

__all__ = [
    "ATTENTION_QUERIES",
    "Anatomy",
    "Attention",
    "Block",
    "CAPTURED",
    "CROSS",
    "FirstCall",
    "HOST",
    "LAST",
    "Layer",
    "MeanLoss",
    "ModelParts",
    "NotSeenError",
    "OF_THE_BATCH",
    "Part",
    "PassInfo",
    "Plans",
    "SOURCES",
    "Snapshot",
    "Stack",
    "TensorPlace",
    "Window",
    "at_places",
    "check_extra_layers",
    "concat_heads",
    "derive_seed",
    "explain_missing",
    "extra_pass",
    "extra_passes",
    "find_anatomy",
    "in_cuda_graph",
    "note_on_layers",
    "query_places",
    "queue_copy",
    "random_states_kept",
    "shown_name",
    "source_of",
    "sources_shared_by",
    "unseen",
    "views_of",
    "whole_sequences",
    "without_modes",
]
