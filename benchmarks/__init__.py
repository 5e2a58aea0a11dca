"""What geomon costs: ratios of medians, measured side by side in one run."""
