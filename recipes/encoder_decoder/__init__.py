"""One transformer with and without the causal mask and attention: anisotropy over depth."""
