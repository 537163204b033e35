"""What a machine decides about a run, found by short trials: `samestep tune`."""
