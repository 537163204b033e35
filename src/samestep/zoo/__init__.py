"""Datasets and models of the shipped recipes."""
