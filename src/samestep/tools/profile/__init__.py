"""Profiler of training steps: `samestep profile`."""
