"""Functions of a script about its ranks. The world is that of `samestep.init`, which each call joins if needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from samestep.distributed import world as collectives
from samestep.distributed.env import read_rendezvous
from samestep.distributed.world import Value, World
from samestep.launcher.job import process_state
from samestep.session import init


def is_main() -> bool:
    """Return whether this process is rank 0, which writes files and prints; also before `samestep.init`."""
    if process_state.world is not None:
        return process_state.world.is_main
    if process_state.worker is not None:
        return process_state.worker.rank == 0
    rendezvous = read_rendezvous() or process_state.rendezvous
    return rendezvous is None or rendezvous.rank == 0


def request_stop() -> None:
    """Request the end of the training loop, on all ranks after the same step. One rank suffices.

    Ranks agree on requests inside the messages of a step. Loops over `samestep.epochs` and
    `CheckpointManager.epochs` end before the next batch; the latter write a checkpoint, unless no
    step followed the last one. The script then ends with exit code 130. A loop that has its last
    batch ends as without a request. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C are requests in a loop over
    `CheckpointManager.epochs`, unless the script has handlers of its own.
    """
    init().context.stop.is_made = True


@contextmanager
def main_first() -> Iterator[None]:
    """Run the block on rank 0 before the other ranks, such as a download into a folder that all of them read.

    Raises:
        PeerLostError: rank 0 ended in the block.
    """
    world = init()
    if not world.is_main:
        world.barrier()
    yield
    if world.is_main:
        world.barrier()


def all_gather(value: Any, world: World | None = None) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. Collective.

    Args:
        value: a dense tensor, whose shape and dtype may differ between ranks; or a JSON value:
            number, string, boolean, None, or lists and string-keyed mappings of these. Tensors
            arrive on the device of the rank, without gradient; tuples arrive as lists.
        world: the ranks; None for those of `samestep.init`.

    Raises:
        InputError: `value` is neither a tensor nor a JSON value.
        PeerLostError: another rank ended.
    """
    return collectives.all_gather(value, world or init())


def reduce_dict(
    values: Mapping[str, Value],
    world: World | None = None,
    *,
    count: float = 1.0,
    reduce: Literal["mean", "sum"] = "mean",
) -> dict[str, Value]:
    """Return the mean of each value over ranks, weighted by `count`, or the sum. Collective.

    With the number of samples as `count`, the result is the mean over all samples, not a mean of
    means. All ranks get the same bits.

    Args:
        values: numbers, or tensors with the same shape on every rank; the same keys on every rank.
        world: the ranks; None for those of `samestep.init`.
        count: number of items behind the values of this rank; 0 for a rank without items, whose
            values are ignored.
        reduce: `mean`, or `sum` of the values, in which counts other than 0 have no weight.

    Raises:
        InputError: keys or shapes differ between ranks, the sum of counts is 0, or `reduce` is
        unknown.
    """
    return collectives.reduce_dict(values, world or init(), count=count, reduce=reduce)
