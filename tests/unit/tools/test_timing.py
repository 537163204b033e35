"""Launch of a trial: a stop request during a trial ends the command, also if the trial returns a result."""

import os

import pytest

from samestep.launcher.launch import StoppedError
from samestep.tools.timing import run_trial


def test_stop_request_during_a_trial_that_completes() -> None:
    environment = {"SAMESTEP_TEST_LAUNCHER": str(os.getpid())}
    with pytest.raises(StoppedError):
        run_trial("workers.signals", "interrupt_launch", processes=1, preload=(), environment=environment)
