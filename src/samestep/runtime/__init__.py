"""Processes and what they share: environment, session, world, launcher, random state."""
