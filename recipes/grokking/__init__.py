"""Modular arithmetic that is memorised first and understood later, and how geometry foresees it."""
