"""Attention: from a recorded call to views, by any route and from any layout."""
