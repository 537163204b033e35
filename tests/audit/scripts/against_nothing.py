"""Compared with one process: nothing."""

from against_parts import train

train("nothing")
