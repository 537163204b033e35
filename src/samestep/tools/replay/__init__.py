"""`samestep diff`: the first difference of two runs, and steps of a run computed again."""
