"""Compared with one process: scale."""

from against_parts import train

train("scale")
