"""Compared with one process: augmentation."""

from against_parts import train

train("augmentation")
