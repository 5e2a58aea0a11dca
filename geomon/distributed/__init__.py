"""GATHER: find the ranks of a run, and make one reading from the rows of all of them."""

from geomon.distributed.gather import gather
from geomon.distributed.group import (
    RankFailedError,
    RankGroup,
    RanksLostError,
    find_ranks,
    join_ranks,
)
from geomon.distributed.merge import merge_layers

__all__ = [
    "RankFailedError",
    "RankGroup",
    "RanksLostError",
    "find_ranks",
    "gather",
    "join_ranks",
    "merge_layers",
]
