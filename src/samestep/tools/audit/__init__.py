"""Audit of a training command: observers inside its processes, and an analysis of their events."""
