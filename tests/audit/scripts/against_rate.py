"""Compared with one process: rate."""

from against_parts import train

train("rate")
