"""Layers one after another on different ranks."""
