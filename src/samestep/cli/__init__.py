"""The `samestep` command: one module for related subcommands, and the options that they share."""
