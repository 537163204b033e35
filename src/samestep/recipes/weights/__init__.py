"""Weights that come from files."""
