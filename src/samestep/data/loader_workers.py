"""Loading of microbatches in worker processes: requests, failures and end of the workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Sampler, get_worker_info

from samestep.data.batch import Microbatch
from samestep.data.microbatch_dataset import FailedMicrobatch, MicrobatchRequest, SizedDataset
from samestep.distributed.signals import die_with_parent
from samestep.errors import DataError
from samestep.report_limits import message_of

_WORKER_EXIT_SECONDS = 2.0  # time limit for the end of a worker with a broken connection to be visible
MicrobatchLoader = DataLoader[Microbatch | FailedMicrobatch]


class RequestQueue(Sampler[MicrobatchRequest]):
    """Sampler with the requests of the next iteration; workers can persist between iterations."""

    requests: Iterable[MicrobatchRequest] = ()

    def __iter__(self) -> Iterator[MicrobatchRequest]:
        return iter(self.requests)


def read(loader: MicrobatchLoader) -> Iterator[Microbatch | FailedMicrobatch]:
    """Yield the microbatches of a loader; name a worker that is killed."""
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        # A worker killed during a transfer breaks the connection shortly before its end is visible. Then torch
        # raises the error, here or in its handler of SIGCHLD.
        iterator, deadline = loader._iterator, time.monotonic() + _WORKER_EXIT_SECONDS
        while iterator is not None and time.monotonic() < deadline:
            for worker in iterator._workers:  # type: ignore[attr-defined]
                if not worker.is_alive():
                    raise RuntimeError(f"DataLoader worker (pid {worker.pid}) exited unexpectedly") from error
            time.sleep(0.05)
        raise


def end_workers(loader: MicrobatchLoader) -> None:
    """End the worker processes of a loader; the next iteration starts new ones."""
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None


def init_worker(dataset: SizedDataset, init: Callable[[int], None] | None, number: int) -> None:
    """Prepare a worker process, and call the function of the user."""
    die_with_parent(os.getppid())
    # torch resets SIGTERM in workers to its default; a rank that finishes its step on SIGTERM still needs data.
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(1)
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]  # the hook of multiprocessing
    if init is not None:
        object.__setattr__(get_worker_info(), "dataset", dataset)  # the user's; frozen for other changes
        init(number)


def _send_failure(queue: Any, error: Exception, item: tuple[int, Any]) -> None:
    """In a loader worker: send an error in place of data that cannot be pickled; the rank would wait for the data."""
    number, data = item
    if isinstance(data, ExceptionWrapper):  # of an exception whose class only the worker has
        failure: Exception = RuntimeError(f"Caught {data.exc_type.__name__} {data.where}.\nOriginal {data.exc_msg}")
    else:
        failure = DataError(
            f"a loader worker cannot send a microbatch: {message_of(error)}",
            expected="samples of tensors, numbers, strings, and lists, tuples and dicts of these",
            fix="return plain values from the dataset and the collate function, or load without workers: "
            "num_workers=0 (--workers 0)",
            code="E_NOT_PICKLABLE",
        )
    queue.put((number, FailedMicrobatch(failure)))
