"""Unequal and moved shares of the microbatches give the bits of one process."""

from pathlib import Path
from signal import SIGKILL

import pytest

from helpers.small_recipes import DIGITS
from helpers.system import TESTS, Running, events, here, last_saved, state_of, weights
from samestep.launcher.launch import launch
from workers.short_batches import train_on_each

RECIPE = TESTS / "helpers" / "tuned.yaml"
SMALL = ("--set", *DIGITS)
SLOW = ("--set", "model.name=helpers.tuned:SlowOnOneRank", "model.options.seconds=0.04", "microbatches=8")


@pytest.mark.parametrize("shares", [(3, 1), (1, 2, 1)])
def test_short_batches_give_the_same_bits(shares: tuple[int, ...]) -> None:
    """The last batch of 18 samples has one microbatch, which belongs to one of the ranks."""
    sizes = (18, 25)
    alone = launch(train_on_each, sizes, processes=1)
    assert launch(train_on_each, sizes, *shares, processes=len(shares), hang_after=20) == alone


@pytest.mark.slow
def test_layouts_and_resumptions_give_the_same_bits(tmp_path: Path) -> None:
    runs = {
        "alone": ("--processes", 1),
        "unequal": ("--processes", 2, "--shares", "5,3"),
        "one": ("--processes", 2, "--shares", "1,7"),
        "three": ("--processes", 3, "--shares", "6,1,1"),
        "hsdp": ("--processes", 4, "--strategy", "hsdp", "--mesh", "shard=2,replicate=2", "--shares", "1,5,1,1"),
    }
    for name, options in runs.items():
        assert here("train", "digits", "--name", name, *options, *SMALL, cwd=tmp_path) == 0
    folders = {name: tmp_path / "runs" / name for name in runs}
    assert len({weights(run) for run in folders.values()}) == 1
    assert len(events(folders["hsdp"], "step")) == 12
    longer = ("--set", "epochs=2")
    assert here("resume", folders["alone"], *longer, cwd=tmp_path) == 0
    assert here("resume", folders["unequal"], "--processes", 3, *longer, cwd=tmp_path) == 2  # shares of two ranks
    assert here("resume", folders["unequal"], "--processes", 3, "--shares", "1,1,6", *longer, cwd=tmp_path) == 0
    assert weights(folders["unequal"]) == weights(folders["alone"]) != weights(folders["one"])


@pytest.mark.slow
def test_statistics_of_the_global_batch_are_the_same(tmp_path: Path) -> None:
    """The ranks exchange statistics at each batch norm, for different numbers of microbatches."""
    for name, options in {"alone": (), "unequal": ("--processes", 3, "--shares", "2,5,1")}.items():
        sync = ("--set", "step.batch_norm=sync")
        assert here("train", "digits", "--name", name, *options, *SMALL, *sync[1:], cwd=tmp_path) == 0
    assert weights(tmp_path / "runs" / "alone") == weights(tmp_path / "runs" / "unequal")


@pytest.mark.slow
def test_a_slow_rank_gets_fewer_microbatches_after_two_epochs(tmp_path: Path) -> None:
    long = (*SLOW, "data.options.samples=160", "epochs=3")
    for name, options in {"alone": (), "two": ("--processes", 2), "four": ("--processes", 4)}.items():
        auto = ("--shares", "auto") if options else ()
        assert here("train", RECIPE, "--name", name, *options, *auto, *long, cwd=tmp_path) == 0
    alone, two, four = (tmp_path / "runs" / name for name in ("alone", "two", "four"))
    assert weights(alone) == weights(two) == weights(four)
    (moved,) = events(two, "shares")
    assert moved["step"] == 20
    assert sum(moved["shares"]) == 8
    assert moved["shares"][0] > 4 > moved["shares"][1]
    assert moved["seconds_per_microbatch"][1] > 0.04 > moved["seconds_per_microbatch"][0]
    (moved,) = events(four, "shares")
    assert (moved["step"], moved["shares"][1]) == (20, 1)
    # As many ranks as microbatches: none can be moved.
    assert here("resume", two, "--processes", 8, "--set", "epochs=4", cwd=tmp_path) == 2


@pytest.mark.slow
def test_shares_move_at_a_checkpoint_within_an_epoch_and_a_kill_changes_no_bits(tmp_path: Path) -> None:
    long = (*SLOW, "data.options.samples=960", "epochs=1")
    assert here("train", RECIPE, "--name", "alone", *long, cwd=tmp_path) == 0
    run = tmp_path / "runs" / "killed"
    options = ("--processes", 2, "--shares", "auto", "--checkpoint-every", 10, "--workers", 1)
    with Running("train", RECIPE, "--name", "killed", *options, *long, cwd=tmp_path) as running:
        running.until(lambda: events(run, "shares") and last_saved(run) >= 30, "a move and a checkpoint")
        running.kill_group(SIGKILL)
    moved = events(run, "shares")[0]
    assert moved["step"] == 20
    assert state_of(run)["cursor"]["samples"] < 960
    assert here("resume", run, "--processes", 3, cwd=tmp_path) == 0
    assert weights(run) == weights(tmp_path / "runs" / "alone")
