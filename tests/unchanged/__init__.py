"""Unchanged training scripts on several processes, compared with plain Python."""
