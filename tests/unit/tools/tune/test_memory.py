"""What is said of memory, and what of it is put down to a want of it."""

from dataclasses import replace
from signal import SIGKILL

import pytest

from samestep.config import Recipe
from samestep.recipes.parse import load_recipe
from samestep.runtime.crew import RankError
from samestep.runtime.failure import Failure
from samestep.tools.tune.look import Look
from samestep.tools.tune.memory import Memory, examine

SEEN = Look(device="cpu", workers=0, peak=10**9, norms=3, dropouts=1, has_images=True)


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", ["batch_size=60", "shards=4"])


def examined(recipe: Recipe, needs: int, error: RankError, limit: int | None = None) -> tuple[Memory, list[int]]:
    """What comes of ranks that can compute so many shards, and fail so with fewer; the shards that were tried."""
    tried = []

    def look(each: Recipe) -> Look:
        tried.append(each.shards)
        if each.shards < needs:
            raise error
        return SEEN

    return examine(recipe, limit, look, lambda text: None)[0], tried


def out_of_memory() -> RankError:
    text = "[enforce fail at alloc_cpu.cpp:134] DefaultCPUAllocator: can't allocate memory: you tried to"
    return RankError(Failure.of_exception(1, RuntimeError(text)))


def test_what_fits_is_asked_once(recipe: Recipe) -> None:
    memory, tried = examined(recipe, 4, out_of_memory())
    assert tried == [4]
    assert (memory.fits, memory.samples, memory.peak, memory.changes) == (True, 15, 10**9, ())


def test_shards_are_doubled_until_they_fit_and_what_that_changes_is_named(recipe: Recipe) -> None:
    memory, tried = examined(recipe, 10, out_of_memory())
    assert tried == [4, 8, 16]
    assert (memory.fits, memory.enough) == (False, 16)
    assert memory.changes == ("batch norm is over 4 samples in place of 15", "dropout draws other masks")
    assert "can't allocate memory" in memory.said
    assert recipe.shards == 4


def test_the_last_that_is_tried_is_a_sample_a_shard(recipe: Recipe) -> None:
    memory, tried = examined(recipe, 1000, out_of_memory())
    assert tried == [4, 8, 16, 32, 60]
    assert memory.enough is None


def test_batch_norm_over_all_shards_does_not_change(recipe: Recipe) -> None:
    memory, _ = examined(replace(recipe, step=replace(recipe.step, batch_norm="sync")), 8, out_of_memory())
    assert memory.changes == ("dropout draws other masks",)


def test_a_rank_that_the_system_kills_had_no_memory(recipe: Recipe) -> None:
    memory, _ = examined(recipe, 8, RankError(Failure.of_exit(0, -SIGKILL)))
    assert memory.enough == 8


@pytest.mark.parametrize("limit", [None, 10**9])
def test_another_failure_is_none_of_memory(recipe: Recipe, limit: int | None) -> None:
    error = RankError(Failure.of_exception(0, ValueError("a mistake")))
    with pytest.raises(RankError, match="a mistake"):
        examined(recipe, 8, error, limit)


def test_libraries_that_give_up_under_a_limit_had_no_memory(recipe: Recipe) -> None:
    gone = RankError(Failure.of_exit(0, 127))
    assert examined(recipe, 8, gone, limit=10**9)[0].enough == 8
    with pytest.raises(RankError):
        examined(recipe, 8, gone)
    primitive = RankError(Failure.of_exception(0, RuntimeError("could not create a primitive")))
    assert examined(recipe, 8, primitive, limit=10**9)[0].enough == 8
