"""Attention: turn a recorded call, from any route and in any layout, into views."""
