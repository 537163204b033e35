"""Where the time of a recipe's step goes, which rank the others wait for, and what would help: `samestep profile`."""
