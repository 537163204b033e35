"""The `samestep` command: one small file a subcommand."""
