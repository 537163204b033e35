"""Ranks and their devices: world, environment, status, random states, messages."""
