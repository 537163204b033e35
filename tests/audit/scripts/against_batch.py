"""Compared with one process: batch."""

from against_parts import train

train("batch")
