"""Figures of single papers, drawn of the record of any run."""
