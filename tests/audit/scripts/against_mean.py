"""Compared with one process: mean."""

from against_parts import train

train("mean")
