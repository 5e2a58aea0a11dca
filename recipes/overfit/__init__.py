"""Few texts and many epochs: where the geometry turns, and where the held-out loss does."""
