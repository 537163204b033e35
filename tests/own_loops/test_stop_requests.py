"""`samestep.request_stop` and stop signals end a loop after the same step on all ranks, with a checkpoint."""

import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import samestep
from helpers.started import as_torchrun, free_port, ranks
from helpers.system import COMMAND, Running
from own_loops import stopping_loop
from own_loops.stopping_loop import EPOCHS, STEPS_PER_EPOCH
from samestep.launcher.failure import StoppedError

LOOP = Path(stopping_loop.__file__)
STEPS = EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run on one process."""
    folder = tmp_path_factory.mktemp("plain")
    assert samestep.launch(stopping_loop.train, folder, processes=1) == EPOCHS
    return folder


def steps_of(folder: Path) -> int:
    """Return the number of steps that all starts have computed."""
    return len((folder / "steps.txt").read_text(encoding="utf-8").splitlines())


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def require_equal_weights(folder: Path, plain: Path) -> None:
    weights, expected = (torch.load(path / "weights.pt") for path in (folder, plain))
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "rank", "accumulate"),
    [(2, 1, 1), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 0, 1), (3, 2, 3)))],
)
def test_request_of_one_rank_saves_after_its_step(
    plain: Path, tmp_path: Path, processes: int, rank: int, accumulate: int
) -> None:
    with pytest.raises(StoppedError, match="the training loop ended on request"):
        samestep.launch(stopping_loop.train, tmp_path, rank, 7, accumulate, processes=processes)
    assert saved(tmp_path) == [5, 7]
    assert steps_of(tmp_path) == 7
    if accumulate > 1:
        return  # gradients are sums, not means, so the weights are others
    samestep.launch(stopping_loop.train, tmp_path, processes=3 - processes)
    assert steps_of(tmp_path) == STEPS
    require_equal_weights(tmp_path, plain)


@pytest.mark.slow
def test_request_in_the_last_step_of_an_epoch_ends_after_the_epoch(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        samestep.launch(stopping_loop.train, tmp_path, 0, STEPS_PER_EPOCH, processes=2)
    assert saved(tmp_path) == [STEPS_PER_EPOCH]
    assert samestep.launch(stopping_loop.train, tmp_path, processes=2) == EPOCHS - 1
    require_equal_weights(tmp_path, plain)


@pytest.mark.slow
def test_request_in_the_last_step_leaves_the_run_complete(plain: Path, tmp_path: Path) -> None:
    assert samestep.launch(stopping_loop.train, tmp_path, 1, STEPS, processes=2) == EPOCHS
    require_equal_weights(tmp_path, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "number"),
    [
        (0, signal.SIGINT),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((2, signal.SIGINT), (2, signal.SIGTERM), (2, signal.SIGUSR1), (0, signal.SIGTERM))
        ),
    ],
)
def test_signal_saves_and_exits_with_130(plain: Path, tmp_path: Path, processes: int, number: signal.Signals) -> None:
    command, options = (sys.executable,), []
    if processes:
        command, options = COMMAND, ["run", "--processes", processes]
    arguments = [LOOP, tmp_path, -1, -1]
    with Running(*options, *arguments, 0.3, cwd=tmp_path, command=command) as running:
        running.until(lambda: (tmp_path / "steps.txt").exists() and steps_of(tmp_path) >= 2, "two steps")
        running.kill_group(number)
        done = running.wait(60)
    assert done.code == 130
    assert "Traceback" not in done.err
    steps = steps_of(tmp_path)
    assert f"stopped after step {steps}; start the script again to continue" in done.err
    assert saved(tmp_path)[-1] == steps < STEPS
    with Running(*options, *arguments, 0, cwd=tmp_path, command=command) as running:
        assert running.wait(60).code == 0
    assert steps_of(tmp_path) == STEPS
    require_equal_weights(tmp_path, plain)


@pytest.mark.slow
def test_request_under_torchrun_exits_with_130_on_all_ranks(tmp_path: Path) -> None:
    with ranks(as_torchrun(free_port()), 2, LOOP, tmp_path, 1, 3, 0, cwd=tmp_path, command=[sys.executable]) as started:
        done = started.wait()
    assert [one.code for one in done] == [130, 130]
    assert saved(tmp_path) == [3]
    assert "Traceback" not in "".join(one.err for one in done)


@pytest.mark.slow
def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with Running(LOOP, tmp_path, -1, -1, 30, cwd=tmp_path, command=(sys.executable,)) as running:
        running.until((tmp_path / "steps.txt").exists, "the first step")
        running.kill(signal.SIGINT)
        time.sleep(0.5)  # signals that are pending at the same time count once
        running.kill(signal.SIGINT)
        done = running.wait(20)
    assert "KeyboardInterrupt" in done.err
    assert saved(tmp_path) == []
