"""`samestep top`: state of a run, read from its directory."""
