"""Unequal shares of the microbatches give the bits of one process."""

from pathlib import Path

import pytest

from helpers.small_recipes import DIGITS
from helpers.system import events, here, weights
from samestep.launcher.launch import launch
from workers.short_batches import train_on_each

SMALL = ("--set", *DIGITS)


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
