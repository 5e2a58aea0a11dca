"""A longer training of the recipe enwik8: what goes on after the end of the demo."""
