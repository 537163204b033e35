"""Run directories: entries of starts, events of a custom loop, and the directory of such a loop."""

LOOP = "run.json"  # marks the run directory of a custom loop
