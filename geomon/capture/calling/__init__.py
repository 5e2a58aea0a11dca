"""Calls of the model: observed without modifying it, or made once more for a probe."""
