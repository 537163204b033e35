"""`samestep verify`: evidence that N processes compute the same as one, and causes of differences."""
