"""Formulas of the metrics, in LaTeX, and the functions behind them.

x_i are the rows of a layer, N their number and W their width; m their mean, and lambda_j the
eigenvalues of their covariance. q_i and k_j are the queries and keys of a head of width d, a_ij the
weights of attention of query i on the n_i keys that it sees, s_ij the scores before the softmax, Q
the number of sampled queries; c_e says how often expert e is chosen.
"""

_LAW = r"\log \lambda_j \approx c - \alpha \log j, \quad j = 11, \dots, 100"
_RANK = r"\exp\Big(-\sum_j p_j \log p_j\Big), \quad p_j = \frac{\lambda_j}{\sum_l \lambda_l}"
_SHARE = r"\frac{\lambda_1}{\sum_j \lambda_j}"
_TWONN = (
    r"-\log(1 - F(\mu_i)) \approx d \, \log \mu_i, \quad \mu_i = \frac{r_{i,2}}{r_{i,1}}, \quad "
    r"\text{fitted to the smallest 90 % of the } \mu_i"
)
_COSINE = r"\frac{1}{N(N-1)} \sum_{i \neq j} \frac{x_i \cdot x_j}{\|x_i\| \, \|x_j\|}"
_TYPES = r"\text{types } t \text{ with means } m_t"

FORMULAS = {
    "twonn": _TWONN,
    "twonn_distinct": _TWONN,
    "gride": (
        r"\max_d \sum_i \Big[ \log d + (k - 1) \log(\mu_i^d - 1) "
        r"- \big(d (2k - 1) + 1\big) \log \mu_i \Big], "
        r"\quad \mu_i = \frac{r_{i,2k}}{r_{i,k}}"
    ),
    "anisotropy": _SHARE,
    "anisotropy_without_massive": _SHARE,
    "massive_share": (
        r"1 - \frac{\sum_{i \text{ ordinary}} \|x_i - m'\|^2}{\sum_i \|x_i - m\|^2}, "
        r"\quad m' \text{ the mean of the ordinary rows}"
    ),
    "effective_rank": _RANK,
    "effective_rank_last": _RANK,
    "participation_ratio": r"\frac{(\sum_j \lambda_j)^2}{\sum_j \lambda_j^2}",
    "cosine": _COSINE,
    "query_cosine": _COSINE.replace("x_", "q_"),
    "key_cosine": _COSINE.replace("x_", "k_"),
    "cosine_centred": _COSINE.replace("x_i", "(x_i - m)").replace("x_j", "(x_j - m)"),
    "drift_norm": r"\|m\|, \quad m = \frac{1}{N} \sum_i x_i",
    "variance": r"\frac{1}{N} \sum_i \|x_i - m\|^2",
    "mean_square_norm": r"\frac{1}{N} \sum_i \|x_i\|^2 = \|m\|^2 + V",
    "within_variance": r"\frac{1}{N - T} \sum_i \|x_i - m_{t(i)}\|^2, \quad T \ " + _TYPES,
    "variance_shares": (
        r"\frac{V_W}{V}, \quad Q = \underbrace{\|m\|^2}_{M} + \underbrace{V_B + V_W}_{V}"
    ),
    "norm_variance_slope": r"V_t \approx a + b \, \|m_t\|^2 \ \text{over } " + _TYPES,
    "qk_cosine": r"\frac{\bar q \cdot \bar k}{\|\bar q\| \, \|\bar k\|}",
    "qk_dot": r"\bar q \cdot \bar k",
    "query_mean_norm": r"\|\bar q\|",
    "key_mean_norm": r"\|\bar k\|",
    "query_anisotropy": _SHARE,
    "key_anisotropy": _SHARE,
    "attention_entropy": r"-\frac{1}{Q} \sum_i \sum_j a_{ij} \log a_{ij}",
    "attention_entropy_normalised": (
        r"\frac{1}{Q} \sum_i \frac{-\sum_j a_{ij} \log a_{ij}}{\log n_i}"
    ),
    "attention_sink": r"\frac{1}{Q} \sum_i a_{i, \text{first}}",
    "attention_extremes": r"\frac{1}{Q} \sum_i \max_j a_{ij}, \ \dots",
    "max_logit": r"\max_{i,j} s_{ij}",
    "norm_growth": r"\sqrt{\frac{\sum_i \|x_i^{(l)}\|^2}{\sum_i \|x_i^{(l-1)}\|^2}}",
    "residual_cosine": (r"\frac{1}{N} \sum_i \cos\big(x_i^{(l)} - x_i^{(l-1)}, \ x_i^{(l-1)}\big)"),
    "head_output_norm": r"\sqrt{\frac{1}{N} \sum_i \|o_i\|^2}, \quad o_i \text{ the head's output}",
    "update_size": r"\frac{1}{s} \, \frac{\|W_{t+s} - W_t\|_F}{\|W_t\|_F}",
    "unmoved": r"\frac{1}{n} \, \#\{j : w_{t+s, j} = w_{t, j}\}",
    "weight_norm": r"\sqrt{\sum_{W \text{ of the block}} \|W\|_F^2}",
    "expert_load": r"\exp\Big(\frac{1}{E} \sum_e \log \frac{c_e}{\bar c}\Big)",
    "alpha": _LAW,
    "alpha_last": _LAW,
    "local_dimension": r"\frac{1}{Q} \sum_i \mathrm{TwoNN}(\text{64 nearest rows of } x_i)",
    "local_anisotropy": r"\frac{1}{Q} \sum_i \frac{\lambda_1}{\sum_j \lambda_j} "
    r"(\text{64 nearest rows of } x_i)",
    "mean_query_share": (
        r"\frac{\bar q^\top \Sigma_k \bar q}{\frac{1}{Q} \sum_i q_i^\top \Sigma_k q_i}, "
        r"\quad \Sigma_k \text{ the covariance of the keys}"
    ),
    "score_mean": r"\frac{1}{Q} \sum_i \frac{1}{n_i} \sum_j s_{ij}",
    "score_spread": r"\frac{1}{Q} \sum_i \sqrt{\frac{1}{n_i} \sum_j (s_{ij} - \bar s_i)^2}",
}

# Functions of geomon.kernels that compute metrics.
FUNCTIONS = {
    "twonn": "dimension.twonn", "twonn_distinct": "dimension.twonn", "gride": "dimension.gride",
    "anisotropy": "spectrum.anisotropy", "anisotropy_without_massive": "spectrum.anisotropy",
    "effective_rank": "spectrum.effective_rank", "effective_rank_last": "spectrum.effective_rank",
    "alpha": "spectrum.power_law", "alpha_last": "spectrum.power_law",
    "participation_ratio": "spectrum.participation_ratio", "qk_cosine": "angles.qk_cosine",
    "qk_dot": "angles.qk_dot", "cosine_centred": "angles.cosine_centred",
    "attention_entropy": "attention.attention_entropy",
    "attention_entropy_normalised": "attention.attention_entropy_normalised",
    "attention_sink": "attention.attention_sink", "expert_load": "loads.expert_loads",
    "mean_query_share": "scores.mean_query_share", "score_mean": "scores.score_mean",
    "score_spread": "scores.score_spread", "norm_growth": "additions.norm_growth",
    "residual_cosine": "additions.residual_cosine",
}  # fmt: skip
