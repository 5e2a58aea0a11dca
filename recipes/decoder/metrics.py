"""What the experiment measures: geomon's own metrics, and one control."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from geomon import METRICS, select
from geomon.kernels.token_types import token_types

# What claims are asked of beyond the default metrics.
MORE = (
    "alpha_last", "effective_rank_last", "local_anisotropy", "local_cosine", "cosine_centred",
    "cosine_within", "cosine_between", "mean_query_share", "query_cosine", "key_cosine",
)  # fmt: skip


def norm_variance_slope_shuffled(hidden: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
    """Fit the slope of V_t on M_t over types to which the rows are assigned at random.

    The types keep their numbers of rows and nothing else, so that the slope is what arithmetic
    alone makes: V_t = Q_t - M_t.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].
    """
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(len(token_ids), generator=generator)
    fit = token_types(hidden, token_ids[order.to(token_ids.device)]).norm_variance_slope()
    return {"": fit.slope, "r_squared": fit.r_squared, "q_variation": fit.q_variation}


DECODER_METRICS: Mapping[str, Callable[..., Any]] = {
    **METRICS,
    **select(*MORE),
    "norm_variance_slope_shuffled": norm_variance_slope_shuffled,
}
