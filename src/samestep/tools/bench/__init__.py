"""One recipe in the ways in which it can run on this machine, side by side: `samestep bench`."""
