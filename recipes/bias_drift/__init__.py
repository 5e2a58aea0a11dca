"""A Transformer block with a common bias added to its input: the effect of drift on attention."""
