"""Metrics of evaluations."""
