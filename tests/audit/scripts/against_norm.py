"""Compared with one process: norm."""

from against_parts import train

train("norm")
