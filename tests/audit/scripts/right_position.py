"""A resumed run skips the batches of the run before."""

from resumed_parts import run

run(0)
run(1, skips=True)
