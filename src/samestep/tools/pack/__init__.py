"""Sharded files from any iterable of samples, and indices of existing files."""
