"""The page of all claims: what papers assert, and what the experiments here measured."""
