"""Usage: `python with_samestep_late.py MARK PROCESSES`.

The same as `with_samestep.py`, but this process never imports torch: modules that need it are imported by name,
once, where the ranks come from.
"""

import sys

import samestep


def train(mark: str) -> None:
    from with_samestep import train as train_rank

    train_rank(mark)


if __name__ == "__main__":
    samestep.launch(train, sys.argv[1], processes=int(sys.argv[2]))
