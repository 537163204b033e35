"""Compared with one process: order."""

from against_parts import train

train("order")
