"""`samestep verify`: comparison of N processes with one, and causes of differences."""
