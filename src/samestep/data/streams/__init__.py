"""Streams of samples from sharded files."""
