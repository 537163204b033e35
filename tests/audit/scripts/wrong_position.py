"""A resumed run trains the first batches of the epoch again."""

from resumed_parts import run

run(0)
run(1)
