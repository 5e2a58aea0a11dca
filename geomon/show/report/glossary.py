"""Meanings of metrics in a sentence each, for pages; docs/metrics.md has formulas and sources."""

MEANINGS = {
    "twonn": "Intrinsic dimension: how many directions the cloud of hidden states uses locally, "
    "from the distances to the two nearest neighbours. Repeated tokens lower it.",
    "twonn_distinct": "The same on one row for each token at each position, without copies.",
    "gride": "Intrinsic dimension at larger scales: k1 to k32 neighbours.",
    "anisotropy": "Share of the variance along one direction: 1 is a line, small values a round "
    "cloud.",
    "anisotropy_no_sinks": "Anisotropy without the few rows of massive norm.",
    "sink_share": "Share of the variance that a few rows of massive norm carry.",
    "effective_rank": "Number of directions over which the variance is spread.",
    "participation_ratio": "As effective rank, weighted towards the leading directions.",
    "cosine": "Mean cosine between tokens: 1 is a narrow cone, 0 no common direction.",
    "drift_norm": "Length of the mean hidden state: how far the cloud has moved from the origin.",
    "variance": "Mean squared distance from the mean hidden state.",
    "mean_square_norm": "Mean squared length of hidden states.",
    "within_variance": "Variance around the mean of a token's type: what context adds.",
    "between_variance": "Variance of the means of token types: what the token itself says.",
    "norm_variance_slope": "Trade between mean and variance over token types; -1 where what one "
    "gains the other loses.",
    "mean_share": "Share of the mean squared length that the common mean has.",
    "within_share": "Share of the variance within token types.",
    "between_share": "Share of the variance between token types.",
    "qk_cosine": "Cosine between a head's mean query and mean key: far from 0, the head scores all "
    "tokens alike.",
    "qk_cosine_concatenated": "The same with all heads of a layer side by side.",
    "qk_dot": "Product of a head's mean query and mean key, in the units of scores.",
    "query_mean_norm": "Length of a head's mean query.",
    "key_mean_norm": "Length of a head's mean key.",
    "query_cosine": "Mean cosine between the queries of a head.",
    "key_cosine": "Mean cosine between the keys of a head.",
    "query_anisotropy": "Anisotropy of the queries of a head.",
    "key_anisotropy": "Anisotropy of the keys of a head.",
    "attention_entropy": "Entropy of attention in nats: 0 is one key, the logarithm of the number "
    "of visible keys is uniform attention.",
    "attention_entropy_normalised": "Entropy of attention as a share of that of uniform attention.",
    "attention_max": "Mean of the largest attention weight of a query.",
    "attention_min": "Mean of the smallest attention weight of a query.",
    "attention_median": "Mean of the median attention weight of a query.",
    "attention_sink": "Mean attention on the first visible key.",
    "max_logit": "Largest score before the softmax; growth announces instability.",
    "alpha": "Decay of the spectrum: larger is steeper, with fewer directions that matter.",
    "local_dimension": "Intrinsic dimension of small neighbourhoods.",
    "neighbour_overlap": "Share of nearest neighbours that a block keeps.",
    "neighbour_overlap_in_time": "Share of nearest neighbours kept since the reading before.",
    "training": "Values that the training logs, its loss for instance.",
    "geomon": "What geomon costs: overhead is its share of the time of the training.",
}

__all__ = ["MEANINGS"]
