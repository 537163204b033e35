"""`samestep top`: what a run is doing, seen from its directory alone."""
