"""Loggers of metrics and events, and the monitor of each rank."""
