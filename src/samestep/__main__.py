"""The `samestep` command, and `python -m samestep`."""

from __future__ import annotations

import sys

_EXIT_STOPPED = 130  # as in samestep.errors, which is not imported yet


def entry() -> int:
    """Run the command; its exit code."""
    import os
    import signal

    def end(number: int, frame: object) -> None:
        os._exit(_EXIT_STOPPED)

    # No traceback during the imports. And for the first process of a container the kernel ignores
    # signals with the default action.
    before = signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    from samestep.distributed.standard_streams import open_standard_descriptors, protect_output

    open_standard_descriptors()
    # The summary on standard output waits for its reader: the run is complete by then.
    protect_output(stdout_seconds=None)
    if sys.argv[1:] in (["-h"], ["--help"]):
        from samestep.cli.commands import help_text

        print(help_text())
        return 0
    from samestep.cli.main import main

    signal.signal(signal.SIGINT, before)
    code = main()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the result stands
    return code


if __name__ == "__main__":
    # The current folder: a file random.py there would replace Python's module.
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.exit(entry())
