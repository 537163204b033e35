"""Rank of a replay of a script: runs the script again up to a step, and compares checksums of the state."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace

from samestep.data.batch import GlobalBatch
from samestep.distributed.logging import logger
from samestep.engine.callbacks import Callback
from samestep.engine.checksum import checksums_by_name
from samestep.engine.engine import Engine
from samestep.engine.step_stats import StepResult
from samestep.errors import InputError
from samestep.launcher.job import ReplayedFolder, process_state, rank_and_size
from samestep.launcher.worker import EndOfScript, run_script
from samestep.microbatches import Cursor
from samestep.runs.starts import require_same_code
from samestep.tools.replay.checksums import add_checksum
from samestep.tools.replay.flipped_bit import flipped_bit
from samestep.tools.replay.launch import Replayed, ReplayRequest
from samestep.tools.replay.recording import recording


class _ReplayedSteps(Callback):
    """Steps of the engine that makes the first step; the last step of the request ends the script.

    Attributes:
        result: result up to the last step; None before the first step.
        engine: the engine, once it has made a step.
        created: the first engine of the script; after the script, its last step is that of the script.
    """

    def __init__(self, request: ReplayRequest) -> None:
        self._request = request
        self._end = Cursor()
        self.result: Replayed | None = None
        self.engine: Engine | None = None
        self.created: Engine | None = None

    def engine_created(self, engine: Engine) -> None:
        if self.created is not None:
            return
        self.created, request = engine, self._request
        if not engine.world.is_main:
            return
        # The script and its imports are known now.
        for line in require_same_code(request.run, None, accept_changes=request.accept_changes):
            logger.warning("replaying with changed code: %s", line)

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        if self.engine is None:
            self.engine, self.result = engine, Replayed(engine.steps)
        if engine is self.engine:
            self._end = batch.end

    def end_step(self, engine: Engine, result: StepResult) -> None:
        if engine is not self.engine or self.result is None:
            return
        request = self._request
        add_checksum(self.result, request, engine, self._end)
        if result.step >= request.last:
            self.result.by_name.update(checksums_by_name(engine, self._end))
            if request.trial is not None:
                flipped = flipped_bit(self.result, request, engine, self._end)
                self.result = replace(self.result, flipped=flipped)
        if result.step >= request.last or result.stop:
            engine.world.barrier()  # no rank ends while another needs it
            raise EndOfScript


def replay_script(request: ReplayRequest) -> Replayed:
    """Run the script on this rank up to the last step, and return the result.

    Raises:
        InputError: the script has changed since the run, or makes fewer steps.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    command = request.script
    assert command is not None
    steps = _ReplayedSteps(request)
    process_state.is_experiment = True
    process_state.replayed = ReplayedFolder(request.first, accept_changes=request.accept_changes)
    os.chdir(command.directory)
    with recording(request), _output():
        process_state.callbacks.append(steps)  # after that of the record; the process ends with the replay
        run_script(command.path, command.arguments)
    engine, result = steps.engine, steps.result
    if engine is None or result is None or (engine.steps < request.last and not engine.world.stop_requested):
        # A script that resumes a finished run makes no step; another library may not even load the checkpoint.
        end = engine or steps.created
        last = (end.steps if end is not None else 0) or max(request.logged, default=1)
        raise InputError(
            f"step {request.last} of {request.run}: the script ended after step {last}",
            expected="a step of the run, by a script that trains with samestep.Engine",
            fix=f"--step {last} or less",
            code="E_VALUE",
        )
    if engine.steps < request.last:
        return Replayed(result.first, stopped=True)
    return result


@contextmanager
def _output() -> Iterator[None]:
    """Write the output of the script to standard error, that of rank 0 only."""
    rank, _ = rank_and_size()
    if rank == 0:
        with redirect_stdout(sys.stderr):
            yield
        return
    with open(os.devnull, "w", encoding="utf-8") as output, redirect_stdout(output):
        yield
