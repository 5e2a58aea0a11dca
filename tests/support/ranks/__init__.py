"""Programs that run on several ranks, and what starts them. Each tests what its name says."""
