"""Compared with one process: dropout."""

from against_parts import train

train("dropout")
