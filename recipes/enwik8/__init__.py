"""A character-level language model on enwik8."""
