"""Helpers of the tests: commands, models, recipes and faults."""
