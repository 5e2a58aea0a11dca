"""What the tests share: models, references, runs and processes. README.md says which to use."""
