"""Compared with one process: padding."""

from against_parts import train

train("padding")
