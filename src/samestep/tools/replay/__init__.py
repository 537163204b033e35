"""`samestep replay` and `samestep diff`: steps of a run computed again, and the first difference of two runs."""
