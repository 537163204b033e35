"""`samestep report`: one page of HTML about one run or several, which needs nothing else."""
