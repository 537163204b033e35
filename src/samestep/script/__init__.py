"""Unchanged scripts: what a process needs so that a script for one device runs on all ranks."""
