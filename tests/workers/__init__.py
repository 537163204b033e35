"""Functions that tests run in ranks."""
