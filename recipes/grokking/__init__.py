"""Modular arithmetic that is memorised first and understood later, and what geometry foretells."""
