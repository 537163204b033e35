"""Readers of sample files in the formats of other libraries."""
