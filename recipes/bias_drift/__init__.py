"""A Transformer block under a common bias of its input: what drift alone does to attention."""
