"""Observers of torch inside audited processes; each replaces a few functions of torch."""
