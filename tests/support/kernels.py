"""The kernels, for tests, from one place: files of `geomon.kernels` may be merged or split."""

# ruff: noqa: F401
from geomon.capture.snapshot import HOST
from geomon.kernels._blocks import row_blocks, rows_in_block
from geomon.kernels.additions import norm_growth, residual_cosine, row_additions
from geomon.kernels.angles import cosine_centred, leading_share, qk_cosine, qk_dot
from geomon.kernels.attention import (
    attention_entropy,
    attention_entropy_normalised,
    attention_rows,
    attention_sink,
    given_scores,
    scores_of,
)
from geomon.kernels.baselines import (
    isotropic_anisotropy,
    isotropic_cosine_magnitude,
    isotropic_cosine_quantile,
    isotropic_spectrum,
)
from geomon.kernels.dimension import SCALES, gride, twonn, twonn_of_each
from geomon.kernels.groups import GROUPS, group_sequences, group_sums
from geomon.kernels.loads import expert_loads
from geomon.kernels.massive import ordinary_rows, share_beyond
from geomon.kernels.moments import squares_about_mean
from geomon.kernels.neighbourhoods import local_anisotropy, local_dimension
from geomon.kernels.neighbours import Neighbours, content_keys, copies_of, nearest, unique_rows
from geomon.kernels.products import as_factor, product_with_itself
from geomon.kernels.scores import mean_query_share, query_variances, score_moments
from geomon.kernels.spectrum import (
    anisotropy,
    effective_rank,
    head_axes,
    participation_ratio,
    power_law,
    principal_axes,
    spectrum,
)
from geomon.kernels.token_types import token_types
