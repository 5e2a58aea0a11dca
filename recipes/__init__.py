"""Complete training scripts that use geomon, each with its own README."""
