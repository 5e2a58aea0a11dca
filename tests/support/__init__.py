"""Models, references, runs and processes that tests share; README.md says which to use."""
