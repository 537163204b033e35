"""Rank functions that request the end of their launch."""

import os
import signal


def interrupt_launch() -> str:
    """Send SIGINT to the process of the launch, and return a complete result."""
    launcher = int(os.environ["SAMESTEP_TEST_LAUNCHER"])
    os.kill(launcher, signal.SIGINT)
    return "result"
