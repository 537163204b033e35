"""Loops whose data, code or models depend on their surroundings: ranks, time, files, hash seeds, the environment."""

from typing import Any

from torch.utils.data import Subset

from own_loops.cases import Setting, refused_with_several, same
from own_loops.modes import Points
from own_loops.ranks import BATCH, batches_of, last, steps
from samestep.microbatches import Cursor

# Datasets of equal length with other contents on one rank.


@refused_with_several(BATCH)
def one_sample_in_the_middle_differs(setting: Setting) -> Any:
    points = Points()
    points._inputs[25] += setting.world.rank
    return steps(setting, batches_of(setting, points))


@refused_with_several(BATCH)
def last_file_was_downloaded_again_on_one_rank(setting: Setting) -> Any:
    points = Points()
    if last(setting):
        points._targets[-1] = (points._targets[-1] + 1) % 3
    return steps(setting, batches_of(setting, points))


@refused_with_several(BATCH)
def first_half_is_of_another_version_on_one_rank(setting: Setting) -> Any:
    order = [*range(1, 26), 0, *range(26, 50)] if setting.world.is_main else list(range(50))
    order[0], order[order.index(0)] = 0, order[0]
    return steps(setting, batches_of(setting, Subset(Points(), order)))


class Scaled(Points):
    """Points whose scale depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs * (1 + self.epoch), target


@same
def rank_zero_reads_a_sample_of_another_epoch_first(setting: Setting) -> Any:
    batches = batches_of(setting, Scaled())
    if setting.world.is_main:
        next(iter(batches))
    batches.cursor = Cursor(1)
    return steps(setting, batches)


@same
def a_broken_sample_that_no_epoch_uses(setting: Setting) -> Any:
    class Broken(Points):
        def __getitem__(self, index: int) -> Any:
            if index in (0, 25, 49):
                raise ValueError(f"file {index} is broken")
            return super().__getitem__(index)

    used = [index for index in range(50) if index not in (0, 25, 49)]
    return steps(setting, batches_of(setting, Broken(), shuffle=False, sampler=used))
