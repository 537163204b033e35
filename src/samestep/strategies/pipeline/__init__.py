"""Pipelines: partition of a model into stages, and the messages between them."""
