"""What the experiments share: a loop, a model, a command line, claims, and means over seeds."""
