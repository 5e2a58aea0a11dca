"""Few texts and many epochs: compares when the geometry and when the held-out loss turns."""
