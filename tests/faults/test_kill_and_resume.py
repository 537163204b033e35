"""A run that is killed and resumed on another number of processes ends as if nothing had happened."""

import shutil
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.recorded import read_calls
from helpers.system import Running, events, flip_bit, here, last_saved, samestep, state_of, steps_saved, tree, weights
from samestep.config import DEFAULT_KEEP

pytestmark = pytest.mark.slow
RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
SAMPLES, STEPS_AN_EPOCH, STEPS = 102, 13, 39


@dataclass(frozen=True)
class RunPart:
    """Observations of one start of the command: it began after step `begin`; work after step `end` was lost."""

    begin: int
    end: int
    ranks: int
    files: list[Path]


def seen_files(place: Path) -> set[Path]:
    return set(place.glob("seen-*"))


def stopped_in(
    call: int, place: Path, *arguments: object, number: signal.Signals, saved: tuple[Path, int] | None = None
) -> int:
    """Run a command, send its launcher a signal while rank 0 is in a training call of its loss; the exit code.

    `saved` is a run and a step; the signal follows the checkpoint of that step, which is written in the background.
    """
    hold = place / "hold"
    hold.write_text(f"0 {call}", encoding="utf-8")
    before = seen_files(place)
    with Running(*arguments, cwd=place) as running:
        running.until(lambda: calls_of_rank_0(seen_files(place) - before) == call, f"call {call} of rank 0")
        if saved is not None:
            running.until(lambda: is_saved(*saved), f"a checkpoint of step {saved[1]}")
        running.kill(number)
        if number != signal.SIGKILL:
            time.sleep(0.2)  # the request reaches the ranks before the next steps
            hold.unlink()
        code = running.wait(60).code
    hold.unlink(missing_ok=True)  # by then no rank runs
    return code


def is_saved(run: Path, step: int) -> bool:
    """Return whether a checkpoint is complete, and older ones are removed."""
    is_pruned = len(steps_saved(run)) <= DEFAULT_KEEP and not list((run / "checkpoints").glob(".*"))
    return last_saved(run) == step and is_pruned


def calls_of_rank_0(files: set[Path]) -> int:
    return sum(len(batches) for rank, batches in map(read_calls, files) if rank == 0)


@dataclass(frozen=True)
class Story:
    """A run on 2, 3 and 1 processes, as it stood when it was killed and when it was done."""

    place: Path
    killed: Path
    parts: list[RunPart]
    whole: tuple[str, str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    place = tmp_path_factory.mktemp("story")
    run = place / "runs" / "a"
    assert here("train", RECIPE, "--name", "whole", "--processes", 4, cwd=place) == 0
    before = seen_files(place)

    code = stopped_in(6, place, "train", RECIPE, "--name", "a", "--processes", 2, number=signal.SIGTERM)
    assert code == 130
    stopped = state_of(run)["step"]
    first = RunPart(0, stopped, 2, sorted(seen_files(place) - before))
    before = seen_files(place)

    arguments = ("resume", run, "--processes", 3, "--checkpoint-every", 5)
    code = stopped_in(19 - stopped, place, *arguments, number=signal.SIGKILL, saved=(run, 15))
    assert code == -signal.SIGKILL
    second = RunPart(stopped, steps_saved(run)[-1], 3, sorted(seen_files(place) - before))
    killed = shutil.copytree(run, place / "killed" / "a", symlinks=True)
    before = seen_files(place)

    assert here("resume", run, cwd=place) == 0
    third = RunPart(second.end, STEPS, 1, sorted(seen_files(place) - before))
    return Story(place, killed, [first, second, third], weights(place / "runs" / "whole"))


def test_asked_to_end_it_stops_in_the_epoch_with_a_checkpoint_at_the_step(story: Story) -> None:
    first = story.parts[0]
    assert 6 <= first.end < STEPS_AN_EPOCH
    stops = events(story.place / "runs" / "a", "stop")
    assert [event["step"] for event in stops] == [first.end]


def test_killed_in_a_step_the_newest_checkpoint_is_the_last_one_written_whole(story: Story) -> None:
    assert steps_saved(story.killed) == [13, 15]
    assert state_of(story.killed)["cursor"] == {"epoch": 1, "samples": 2 * 8}
    assert not list(story.killed.glob("checkpoints/.*"))


def test_weights_equal_those_of_an_uninterrupted_run(story: Story) -> None:
    assert weights(story.place / "runs" / "a") == story.whole
    assert state_of(story.place / "runs" / "a") == state_of(story.place / "runs" / "whole")


def test_losses_equal_those_of_an_uninterrupted_run(story: Story) -> None:
    for kind, keys in (("step", ("loss", "lr", "grad_norm")), ("evaluation", ("train_loss", "loss", "samples"))):
        losses = [
            {event["step"]: [event[key] for key in keys] for event in events(story.place / "runs" / name, kind)}
            for name in ("a", "whole")
        ]
        assert losses[0] == losses[1]


def test_no_sample_is_seen_twice_or_missed(story: Story) -> None:
    epochs: dict[int, list[int]] = defaultdict(list)
    lost = 0
    for part in story.parts:
        assert len(part.files) == part.ranks
        for file in part.files:
            rank, batches = read_calls(file)  # whole batches on every rank
            for step, indices in enumerate(batches, start=part.begin + 1):
                if step > part.end:
                    lost += len(indices)
                elif rank == 0:
                    epochs[(step - 1) // STEPS_AN_EPOCH] += indices
    assert lost > 0, "the kill lost no step, so this shows nothing"
    assert {epoch: sorted(indices) for epoch, indices in epochs.items()} == {
        epoch: list(range(SAMPLES)) for epoch in range(3)
    }


@pytest.fixture
def damaged(story: Story, tmp_path: Path) -> Path:
    """The killed run with one bit of its newest checkpoint turned over."""
    run = shutil.copytree(story.killed, tmp_path / "runs" / "a", symlinks=True)
    flip_bit(run / "checkpoints" / "step-000000015" / "model.safetensors", 4000)
    return run


def test_damaged_checkpoint_is_refused_and_an_older_one_leads_to_the_same_weights(story: Story, damaged: Path) -> None:
    before = tree(damaged)
    refused = samestep("resume", damaged, cwd=damaged.parent)
    assert refused.code == 2
    assert "step-000000015/model.safetensors" in refused.err
    assert tree(damaged) == before

    assert here("resume", damaged, "--checkpoint", 13, "--processes", 2, cwd=damaged.parent) == 0
    assert weights(damaged) == story.whole


def test_damaged_checkpoint_is_written_anew_when_its_step_comes_again(story: Story, damaged: Path) -> None:
    place = damaged.parents[1]
    arguments = ("resume", damaged, "--checkpoint", 13, "--checkpoint-every", 5)
    code = stopped_in(5, place, *arguments, number=signal.SIGKILL, saved=(damaged, 15))
    assert code == -signal.SIGKILL
    assert here("resume", damaged, cwd=place) == 0
    assert weights(damaged) == story.whole
