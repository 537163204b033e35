"""Worker process of a trial: runs the subject as one rank under observation."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe, Reduction, RunOptions, StrategyConfig
from samestep.distributed.devices import tf32_off
from samestep.distributed.rng import seed_generators
from samestep.errors import EXIT_FAILED
from samestep.global_view import any_rank
from samestep.launcher.job import process_state, rank_and_size
from samestep.launcher.worker import run_script
from samestep.microbatches import Cursor
from samestep.script.summary import Summary
from samestep.script.unchanged import unchanged
from samestep.tools.verify.interventions import apply_to_process
from samestep.tools.verify.loading import observe_loaders
from samestep.tools.verify.observer import Observer
from samestep.tools.verify.trials import PLAIN, Subject, Trial
from samestep.tools.verify.written import describe_files, recorded_files

if TYPE_CHECKING:
    from samestep.recipes.driver import Driver

_SEED = 0


def run(subject: Subject, trial: Trial) -> None:
    """Run the subject as one rank and record its results."""
    rank, size = rank_and_size()
    apply_to_process(trial.interventions, trial.folder, rank)
    with ExitStack() as stack:
        file = stack.enter_context((trial.folder / f"rank-{rank}.jsonl").open("a"))
        if not trial.requires_bits:
            # TF32 rounds so coarsely that mistakes could be within its rounding.
            stack.enter_context(tf32_off())
        observer = Observer(trial, rank, size, file, ends_script=subject.script is not None)
        observer.install()
        if not subject.is_unchanged:
            observer.observe_calls()
        observe_loaders(observer.add_batch)
        process_state.is_experiment = True
        _watch_progress(observer, trial.patience)
        try:
            facts: dict[str, Any] = {}
            if subject.recipe is not None:
                _run_recipe(subject.recipe, trial)
            else:
                facts = _run_script(subject, trial, trial.folder / f"output-{rank}.log", observer)
        except BaseException:
            observer.end("unfinished")
            raise
        process_state.source_files.note_imports()
        observer.end("end", sources=process_state.source_files.hashes, **facts)


def _run_recipe(recipe: Recipe, trial: Trial) -> None:
    """Run the first steps, the last batch of the epoch and one evaluation; end early after a stop request."""
    from samestep.recipes.builder import (
        build,
        start_world,
    )  # need packages that scripts do not need
    from samestep.recipes.predict import evaluated

    assert trial.steps is not None
    # A reference on one process has nothing to divide; other runs on one process may use several
    # devices.
    uses_devices = recipe.strategy.name == "device_map" and trial.reference is not None
    if trial.processes == 1 and not uses_devices:
        recipe = replace(recipe, strategy=StrategyConfig())
    options = RunOptions(device=trial.device, workers=0)
    with start_world(recipe, options) as world:
        built = build(recipe, options, world)
        driver = built.driver
        train = built.train
        checkpoints = CheckpointFolder(trial.scratch)
        if trial.killed is not None and checkpoints.steps():
            checkpoint = checkpoints.find("last")
            train.cursor = load(checkpoint, driver.training).cursor
            driver.steps = int(checkpoint.resolve().name.removeprefix("step-"))
        for batch in train if driver.steps < trial.steps else ():
            step = driver.step(batch).step
            if trial.kill_at is not None:
                _save(driver, checkpoints, Progress(step=step, cursor=train.cursor))
            if any(any_rank(world, world.stop_requested)):
                return
            if step >= trial.steps:
                break
        if (
            train.cursor.samples
        ):  # the last batch of the epoch, unless the earlier steps included it
            train.cursor = Cursor(train.cursor.epoch, (len(train) - 1) * train.batch_size)
            for batch in train:
                driver.step(batch)
        for name, value in evaluated(built, built.metrics).items():
            with (trial.folder / f"output-{world.rank}.log").open("a", encoding="utf-8") as output:
                output.write(f"{name} {value!r}\n")


def _save(driver: Driver, checkpoints: CheckpointFolder, progress: Progress) -> None:
    files = pack(driver.training, progress, keep=driver.world.is_main)
    if driver.world.is_main:
        checkpoints.write(progress.step, files, is_best=False)
    driver.world.barrier()  # the kill of the last rank must not interrupt the write


def _run_script(subject: Subject, trial: Trial, log: Path, observer: Observer) -> dict[str, Any]:
    """Run the script as `samestep run` does, with standard output in a file; return facts for the note on its end."""
    assert subject.script is not None
    process_state.checkpoint_root = scratch = trial.scratch.resolve()
    arguments = tuple(argument.replace("{folder}", str(scratch)) for argument in subject.arguments)
    with log.open("a") as output, contextlib.redirect_stdout(output):
        if not subject.is_unchanged:
            run_script(subject.script, arguments, own_group=False)
            return {}
        start = Path.cwd()
        facts: dict[str, Any] = {}
        surroundings = partial(_unchanged, trial, observer, facts)
        run_script(subject.script, arguments, own_group=False, surroundings=surroundings)
    if observer.rank == 0:
        facts["files"] = describe_files(
            trial.folder, scratch, start, bits=bool(trial.requires_bits)
        )
    return facts


@contextmanager
def _unchanged(trial: Trial, observer: Observer, facts: dict[str, Any]) -> Iterator[None]:
    """Give an unchanged script what it needs, unless it runs in plain Python, and observe it, during the block.

    Args:
        trial: the trial.
        observer: observes the script.
        facts: receives how data were read.
    """
    reduction: Reduction = "exact" if trial.requires_bits else "fast"
    seed_generators(_SEED)  # scripts without seeds can be compared
    with ExitStack() as stack:
        stack.enter_context(recorded_files(trial.folder, trial.scratch))
        summary = Summary({})
        if trial.processes != PLAIN:
            summary = stack.enter_context(unchanged(reduction))
        observer.observe_calls({"strategy": None, "reduction": reduction, "batch_norm": "global"})
        try:
            yield
        finally:
            facts["draws"] = any(reading.state.draws for reading in summary.readings.values())
            facts["readings"] = list(summary.data_lines())


def _watch_progress(observer: Observer, patience: float) -> None:
    """End this process after `patience` seconds without an event; ranks that wait for each other do not end."""

    def watch() -> None:
        while (idle := time.monotonic() - observer.last_event) < patience:
            time.sleep(patience - idle + 0.01)
        observer.write("stuck", {"seconds": patience})
        print(f"no progress for {patience:g} s", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="samestep-verify-watch", daemon=True).start()
