"""Ranks of a launch: their processes, rendezvous, watchdogs, failures and restarts."""
