"""Faults put into healthy trainings: which numbers notice them, how early, and how often falsely."""
