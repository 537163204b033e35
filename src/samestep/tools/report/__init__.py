"""`samestep report`: HTML page about runs."""
