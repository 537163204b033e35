"""Ranks that other libraries start."""
