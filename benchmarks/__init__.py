"""Measures the costs of geomon as ratios of medians, side by side in one run."""
