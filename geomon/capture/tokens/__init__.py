"""Tokens: which rows are sampled, which are padding, and which keys a mask hides."""
