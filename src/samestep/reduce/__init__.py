"""Sums of gradients over ranks."""
