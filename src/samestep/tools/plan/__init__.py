"""Prediction of step time and memory of a recipe on other numbers of devices: `samestep plan`."""
