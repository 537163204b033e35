"""The step: the contract that everything else serves."""
