"""Measuring: a reading as a job, on which device it is measured, and when."""
