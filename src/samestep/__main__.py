"""The `samestep` command, and `python -m samestep`."""

from __future__ import annotations

import signal
import sys


def entry() -> int:
    """Run the command; its exit code."""
    # Ctrl-C before there is anything to end: no page of imports that it interrupted.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from samestep.cli.main import main

    signal.signal(signal.SIGINT, before)
    return main()


if __name__ == "__main__":
    sys.exit(entry())
