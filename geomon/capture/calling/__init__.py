"""Calls of the model: seen without placing anything on it, or made once more for a probe."""
