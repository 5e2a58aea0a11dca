"""Parts that the experiments share: a loop, a model, a command line, claims, means over seeds."""
