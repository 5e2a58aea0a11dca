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
from geomon.distributed.mesh import Mesh, RankPlace, find_place

__all__ = [
    "Mesh",
    "RankFailedError",
    "RankGroup",
    "RankPlace",
    "RanksLostError",
    "find_place",
    "find_ranks",
    "gather",
    "join_ranks",
    "merge_layers",
]
