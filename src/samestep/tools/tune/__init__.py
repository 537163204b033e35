"""Tuning of loader settings for a recipe on this machine: `samestep tune`."""
