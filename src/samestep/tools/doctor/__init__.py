"""Checks of a machine before training."""
