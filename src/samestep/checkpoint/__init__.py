"""Checkpoints: complete or absent, verified before loading, independent of ranks."""
