"""Tasks that run in lockstep: a thread each, one at a time, waiting for each other wherever they meet.

It is a way to stop a model in the middle of its forward, and of its backward, and to go on with that of another
shard. Threads are the only means that Python has for that without the model's help; nothing runs at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from samestep.runtime.random_state import OwnGenerators, preserved_generators
from samestep.runtime.thread_state import ThreadState
from samestep.runtime.threads import Threads, Work

Task = Callable[["Track"], None]


class _Cancelled(BaseException):
    """Ends a task whose lockstep has failed elsewhere; nothing that a model catches."""


class Track:
    """One task of a lockstep, as the task and the lockstep see it.

    Attributes:
        said: what the task brought to the meeting at which it waits; None when it is done.
        done: the task has ended.
    """

    def __init__(
        self, task: Task, state: ThreadState, generators: OwnGenerators, start: Callable[[Work], None]
    ) -> None:
        self._task, self._state, self._generators, self._start = task, state, generators, start
        self._turn, self._pause = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._pause.acquire()
        self._started = self._cancelled = False
        self._answer: Any = None
        self.said: Any = None
        self.done = False
        self._failure: BaseException | None = None

    def meet(self, said: Any) -> Any:
        """Wait, in the task's own thread, until all tasks have said something; what comes of it."""
        if not self._cancelled:  # a model may catch what ended it, and come here again
            self.said = said
            self._pause.release()
            self._turn.acquire()
        if self._cancelled:
            raise _Cancelled
        answer, self._answer = self._answer, None
        return answer

    def go(self, answer: Any) -> None:
        """Let the task run to its next meeting or its end; `wait` comes after it."""
        self._generators.begin_turn()
        self._answer, self.said = answer, None
        if self._started:
            self._turn.release()
        else:
            self._started = True
            self._start(self._work)

    def wait(self) -> None:
        """Wait until the task that goes has met or ended."""
        self._pause.acquire()

    def end(self) -> None:
        """End the task, which waits at a meeting, if it has not ended by itself."""
        if self._started and not self.done:
            self._cancelled = True
            self._turn.release()
            self._pause.acquire()
        self._failure = None

    def raise_failure(self) -> None:
        """Raise what the task has raised, if it has."""
        # Not kept here: graphs of the shard hold this track, and what was raised holds frames, which hold the graphs.
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def keep_generators(self) -> None:
        """Remember the generators for the task's next turn."""
        self._generators.end_turn()

    def _work(self) -> None:
        try:
            self._state.run(lambda: self._task(self))
        except _Cancelled:
            pass
        except BaseException as error:  # boundary: the lockstep raises it in its own thread
            self._failure = error
        finally:
            self.said, self.done = None, True
            self._pause.release()


def run_in_lockstep(
    tasks: Sequence[Task], meet: Callable[[list[Any]], Any], device: torch.device, threads: Threads
) -> None:
    """Run `tasks` until all are done, each in a thread of its own; none is left running whatever happens.

    Each task has the random generators for itself, as if it ran alone; afterwards they are as they were.

    Args:
        tasks: in the order in which they take turns; each is called with its track.
        meet: called in this thread whenever every task has said something or ended, with what they said, in order
            (None for those that ended). All tasks get its value. When all have ended it is called once more.
        threads: end where something fails, and stay otherwise.

    Raises:
        BaseException: whatever the first task that fails, or `meet`, raises.
    """
    state = ThreadState(device)
    tracks = [
        Track(task, state, OwnGenerators(device), partial(threads.submit, number)) for number, task in enumerate(tasks)
    ]
    going: Track | None = None
    answer: Any = None
    try:
        with preserved_generators(device):
            while not all(track.done for track in tracks):
                for track in tracks:
                    if not track.done:
                        going = track
                        track.go(answer)
                        track.wait()
                        going = None
                        track.raise_failure()
                        track.keep_generators()
                answer = meet([track.said for track in tracks])
    except BaseException:
        if going is not None:
            going.wait()
        for track in tracks:
            track.end()
        threads.end()
        raise
