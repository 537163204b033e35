"""Compared with one process: weights."""

from against_parts import train

train("weights")
