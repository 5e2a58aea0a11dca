"""Writing: what a reading leaves in the record, in sinks, and with the user's functions."""
