"""Faults put into healthy trainings: which numbers notice them, how early, how often falsely."""
