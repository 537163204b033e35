"""The `samestep` command, and `python -m samestep`."""

from __future__ import annotations

import sys


def entry() -> int:
    """Run the command; its exit code."""
    import signal

    # Ctrl-C before there is anything to end: no page of imports that it interrupted.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from samestep.distributed.streams import open_standard_descriptors, protect_output

    open_standard_descriptors()
    # The summary on standard output waits for its reader: the run is complete by then.
    protect_output(stdout_seconds=None)
    from samestep.cli.main import main

    signal.signal(signal.SIGINT, before)
    return main()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder: a file random.py there would replace Python's module
    sys.exit(entry())
