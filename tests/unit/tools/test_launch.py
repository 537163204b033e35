"""Launch of a trial: a stop request ends the command, which can only be started again."""

import pytest

from samestep.launcher.launch import StoppedError
from samestep.tools import launch
from samestep.tools.launch import run_on_ranks


def test_stopped_trial_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise StoppedError("stopped before the end of a step", fix="resume from the newest checkpoint, if any")

    monkeypatch.setattr(launch, "run_workers", stop)
    with pytest.raises(StoppedError, match="stopped on request") as caught:
        run_on_ranks("module", "function", processes=1, preload=())
    assert caught.value.fix == "start the command again"
