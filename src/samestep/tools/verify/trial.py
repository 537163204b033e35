"""What every rank of a trial does."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading
import time
from pathlib import Path

from samestep.checkpoint.state import Progress, load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe, RunOptions
from samestep.cursor import Cursor
from samestep.engine.observer import observe
from samestep.errors import EXIT_FAILED
from samestep.recipes.build import Built, build
from samestep.runtime.session import seat, start
from samestep.tools.verify.holding import hold_process
from samestep.tools.verify.plan import Subject, Trial
from samestep.tools.verify.probe import EnoughSteps, Probe


def run(subject: Subject, trial: Trial) -> bool:
    """Run the subject as one rank and write down what it computes; whether somebody asked it to end."""
    rank, size = seat()
    hold_process(trial.held, trial.folder)
    with (trial.folder / f"rank-{rank}.jsonl").open("a") as file:
        probe = Probe(trial, rank, size, file, ends_script=subject.script is not None)
        observe(probe)
        _watch(probe, trial.patience)
        with contextlib.suppress(EnoughSteps):
            if subject.recipe is not None:
                _run_recipe(subject.recipe, trial, probe)
            else:
                _run_script(subject, trial, trial.folder / f"output-{rank}.log")
        probe.note("end", {})
        return probe.was_stopped


def _run_recipe(recipe: Recipe, trial: Trial, probe: Probe) -> None:
    """The first steps, the last batch of the epoch, and one evaluation."""
    assert trial.steps is not None
    rules = recipe.step
    # One process is what others are compared with; it has nothing to divide, but may have several devices.
    has_devices = recipe.strategy.name in ("dp", "placed") and trial.reference is not None
    strategy = recipe.strategy if trial.processes > 1 or has_devices else None
    with start(device=trial.device, reduction=rules.reduction, threads=rules.threads, strategy=strategy) as world:
        built = build(recipe, RunOptions(device=trial.device, workers=0), world)
        probe.note("data", {"train": built.train.samples, "evaluation": built.evaluation.samples})
        if trial.checkpoint is not None:
            built.train.cursor = load(trial.checkpoint, built.engine.training).cursor
            built.engine.steps = int(trial.checkpoint.resolve().name.removeprefix("step-"))
        if built.engine.steps < trial.steps:
            for batch in built.train:
                result = built.engine.step(batch)
                if trial.kill_at is not None:
                    _save(built, trial, result.step, batch.end)
                if result.step >= trial.steps or batch.end.epoch > batch.begin.epoch:
                    break
        _step_last_batch(built)
        built.engine.evaluate(built.evaluation, list(built.metrics))


def _step_last_batch(built: Built) -> None:
    """Where the steps did not reach it, the batch that holds what is left of the epoch."""
    train = built.train
    if train.cursor.samples:
        train.cursor = Cursor(train.cursor.epoch, (len(train) - 1) * train.batch_size)
        for batch in train:
            built.engine.step(batch)


def _save(built: Built, trial: Trial, step: int, cursor: Cursor) -> None:
    world = built.engine.world
    files = pack(built.engine.training, Progress(step=step, cursor=cursor), keep=world.is_main)
    if world.is_main:
        CheckpointFolder(trial.folder / "checkpoints").write(step, files, is_best=False)
    world.barrier()  # the rank that is about to be killed must not end the one that writes


def _run_script(subject: Subject, trial: Trial, log: Path) -> None:
    """As `python script.py arguments` would, with what it prints in a file."""
    assert subject.script is not None
    scratch = str((trial.scratch or trial.folder / "scratch").resolve())
    arguments = [argument.replace("{folder}", scratch) for argument in subject.arguments]
    sys.argv = [str(subject.script), *arguments]
    sys.path.insert(0, str(subject.script.parent.resolve()))
    with log.open("a") as output, contextlib.redirect_stdout(output):
        try:
            runpy.run_path(str(subject.script), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise


def _watch(probe: Probe, patience: float) -> None:
    """End this rank when its engine has told nothing for too long: ranks that wait for each other never would."""

    def watch() -> None:
        while (idle := time.monotonic() - probe.last_event) < patience:
            time.sleep(patience - idle + 0.01)
        probe.note("stuck", {"seconds": patience})
        print(f"no progress for {patience:g} s", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="samestep-verify-watch", daemon=True).start()
