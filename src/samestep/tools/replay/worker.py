"""Rank of a replay, of a recipe or of a script: computes steps again and compares the checksums of the state."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.state import load
from samestep.config import Recipe, RunOptions
from samestep.data.batch import GlobalBatch
from samestep.distributed.logging import logger
from samestep.engine import checksum
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.learning_rate import apply_schedule
from samestep.engine.step_stats import StepResult
from samestep.errors import InputError
from samestep.launcher.job import ReplayedFolder, process_state, rank_and_size
from samestep.launcher.worker import EndOfScript, run_script
from samestep.microbatches import Cursor, require_position
from samestep.runs.folder import require_same_code
from samestep.tools.replay.launch import Replayed, ReplayOptions, ScriptCommand, Subject
from samestep.tools.verify.trials import Trial
from samestep.tools.verify.worker import Probe


class _Steps(Callback):
    """Steps of the engine that makes the first step, and their checksums."""

    def __init__(self, subject: Subject, last: int, options: ReplayOptions) -> None:
        self._subject, self._last, self._options = subject, last, options
        self._engine: Engine | None = None
        self._is_created = False
        self.is_complete = False
        self.is_stopped = False
        self._end = Cursor()
        self.result = Replayed(str(subject.folder), subject.processes)

    def engine_created(self, engine: Engine) -> None:
        if not self._is_created and engine.world.is_main and isinstance(self._subject.command, ScriptCommand):
            # The script and its imports are known now.
            folder, accepts = self._subject.folder, self._options.accept_changes
            for line in require_same_code(folder, None, accept_changes=accepts):
                logger.warning("replaying with changed code: %s", line)
        self._is_created = True

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        if self._engine is None:
            self._engine, self.result.first = engine, engine.steps
        if engine is self._engine:
            self._end = batch.end

    def end_step(self, engine: Engine, result: StepResult) -> None:
        if engine is not self._engine:
            return
        step, is_last = result.step, result.step >= self._last
        self.is_stopped = result.stop
        logged = self._subject.checksums.get(step)
        if logged is not None or is_last:
            self._add_checksum(engine, step, logged)
        if is_last:
            self.result.by_name = checksum.checksums_by_name(engine, self._end)
            self.is_complete = True
        if (is_last or result.stop) and isinstance(self._subject.command, ScriptCommand):
            engine.world.barrier()  # no rank ends while another needs it
            raise EndOfScript

    def _add_checksum(self, engine: Engine, step: int, logged: str | None) -> None:
        """Compare the checksum of the state with the logged one; collective as `state_checksum`."""
        value = checksum.state_checksum(engine, self._end)
        if value is None:
            return
        own = self.result.checksums[step] = f"{value:016x}"
        self.result.compared += logged is not None
        if logged not in (None, own) and self.result.first_different is None:
            self.result.first_different = step


def replay_recipe(subject: Subject, last: int, trial: Trial | None, options: ReplayOptions) -> Replayed | None:
    """Compute the steps on this rank, and return the result; None after a request to stop.

    Raises:
        InputError: the user's code has changed since the run, or the run has fewer steps.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    # Here, since they need packages that scripts do not need.
    from samestep.recipes.builder import build, start_world
    from samestep.recipes.run import without_pretrained

    recipe, checkpoint = subject.command, subject.checkpoint
    assert isinstance(recipe, Recipe)
    run_options = RunOptions(device=options.device)
    with _recording(subject, last, trial, options) as steps, start_world(recipe, run_options) as world:
        if world.is_main:
            require_same_code(subject.folder, checkpoint, accept_changes=options.accept_changes)
        built = build(recipe if checkpoint is None else without_pretrained(recipe), run_options, world)
        engine, epochs = built.engine, recipe.epochs
        if checkpoint is not None:
            progress = load(checkpoint, engine.training)
            engine.steps, built.train.cursor = progress.step, progress.cursor
            epochs = progress.recipe.get("epochs", epochs)
            require_position(progress.cursor, built.train.samples_of(progress.cursor.epoch), built.train.batch_size)
        if epochs != recipe.epochs and isinstance(engine.scheduler, LambdaLR):
            apply_schedule(engine.scheduler)  # as the trainer does
        for batch in built.train.endless():
            if batch.begin.epoch >= recipe.epochs:
                raise _too_few_steps(subject, last)
            if engine.step(batch).stop or engine.steps >= last:
                break
        return steps.result if steps.is_complete else None


def replay_script(subject: Subject, last: int, trial: Trial | None, options: ReplayOptions) -> Replayed | None:
    """Run the script on this rank up to the last step, and return the result; None after a request to stop.

    Raises:
        InputError: the script has changed since the run, or makes fewer steps.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    command = subject.command
    assert isinstance(command, ScriptCommand)
    process_state.is_experiment = True
    process_state.replayed = ReplayedFolder(subject.first, accept_changes=options.accept_changes)
    os.chdir(command.directory)
    rank, _ = rank_and_size()
    with ExitStack() as stack:
        steps = stack.enter_context(_recording(subject, last, trial, options))
        nothing = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        # The output of the script is not that of the command.
        stack.enter_context(redirect_stdout(sys.stderr if rank == 0 else nothing))
        run_script(command.path, command.arguments)
    if steps.is_complete:
        return steps.result
    if steps.is_stopped:
        return None
    raise _too_few_steps(subject, last)


def _too_few_steps(subject: Subject, last: int) -> InputError:
    return InputError(
        f"step {last} of {subject.folder}, which ends before this step",
        expected="a step of the run, by a recipe or by a script that trains with samestep.Engine",
        fix=f"--step {max(subject.checksums)} or less",
        code="E_VALUE",
    )


@contextmanager
def _recording(subject: Subject, last: int, trial: Trial | None, options: ReplayOptions) -> Iterator[_Steps]:
    """Yield the steps in the block; with a trial, record them as `samestep verify` does."""
    steps = _Steps(subject, last, options)
    with ExitStack() as stack:
        if trial is not None:
            rank, size = rank_and_size()
            file = stack.enter_context((trial.folder / f"rank-{rank}.jsonl").open("a"))
            process_state.callbacks.append(Probe(trial, rank, size, file))
        process_state.callbacks.append(steps)  # after the record, since it ends a script
        yield steps
