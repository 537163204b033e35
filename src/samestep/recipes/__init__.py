"""Recipes: reading, overrides, and construction of the objects of a run."""
