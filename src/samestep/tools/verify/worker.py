"""Worker process of a trial: runs the subject as one rank under observation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe, Reduction, RunOptions, StrategyConfig
from samestep.cursor import Cursor
from samestep.distributed.kernels import tf32_off
from samestep.distributed.rng import seed_generators
from samestep.launcher.process_state import process_state, rank_and_size
from samestep.script.summary import Summary
from samestep.script.unchanged import unchanged
from samestep.tools.ranks import StopRequested, begin_experiment, run_logged, train
from samestep.tools.verify.interventions import apply_to_process
from samestep.tools.verify.observer import Observer
from samestep.tools.verify.texts import describe_files, recorded_files
from samestep.tools.verify.trials import PLAIN, Subject, Trial


def run(subject: Subject, trial: Trial) -> bool:
    """Run the subject as one rank, record its results, and return True."""
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
        begin_experiment(trial.scratch.resolve())
        try:
            facts: dict[str, Any] = {}
            if subject.recipe is not None:
                _run_recipe(subject.recipe, trial)
            else:
                facts = _run_script(subject, trial, observer)
        except BaseException:
            # With the events since the last step: the first difference can be among these.
            observer.end("unfinished")
            raise
        # At the end: a script can import modules at any time.
        process_state.source_files.note_imports()
        observer.end("end", sources=process_state.source_files.hashes, **facts)
    return True


def _run_recipe(recipe: Recipe, trial: Trial) -> None:
    """Run the first steps, the last batch of the epoch and one evaluation."""
    # Here, since scripts do not need the packages of recipes.
    from samestep.recipes.builder import build, start_world
    from samestep.recipes.predict import evaluated

    assert trial.steps is not None
    # A reference on one process has nothing to divide; other runs on one process may use several
    # devices.
    uses_devices = recipe.strategy.name == "device_map" and trial.reference is not None
    if trial.processes == 1 and not uses_devices:
        recipe = replace(recipe, strategy=StrategyConfig())
    # Without loader workers, in whose processes experiments would observe no sample.
    options = RunOptions(device=trial.device, workers=0)
    with start_world(recipe, options) as world, suppress(StopRequested):
        built = build(recipe, options, world)
        driver = built.driver
        batches = built.train
        checkpoints = CheckpointFolder(trial.scratch)
        # A trial that was killed in the first step has no checkpoint.
        if trial.killed is not None and checkpoints.steps():
            saved = load(checkpoints.find("last"), driver.training)
            batches.cursor = saved.cursor
            driver.steps = saved.step
        trained = train(driver, batches)
        while driver.steps < trial.steps and next(trained, None) is not None:
            if trial.kill_at is not None:
                progress = Progress(step=driver.steps, cursor=batches.cursor)
                files = pack(driver.training, progress, keep=world.is_main)
                if world.is_main:
                    checkpoints.write(progress.step, files, is_best=False)
                world.barrier()  # the kill of the last rank must not interrupt the write
        # The last batch of the epoch, unless the earlier steps included it.
        if batches.cursor.samples:
            last = (len(batches) - 1) * batches.batch_size
            batches.cursor = Cursor(batches.cursor.epoch, last)
            for batch in batches:
                driver.step(batch)
        with (trial.folder / f"output-{world.rank}.log").open("a", encoding="utf-8") as output:
            for name, value in evaluated(built, built.metrics).items():
                output.write(f"{name} {value!r}\n")


def _run_script(subject: Subject, trial: Trial, observer: Observer) -> dict[str, Any]:
    """Run the script as `samestep run` does, and return facts for the note on its end."""
    assert subject.script is not None
    scratch = trial.scratch.resolve()
    arguments = tuple(argument.replace("{folder}", str(scratch)) for argument in subject.arguments)
    log = trial.folder / f"output-{observer.rank}.log"
    if not subject.is_unchanged:
        run_logged(subject.script, arguments, log, own_group=False)
        return {}
    start = Path.cwd()
    facts: dict[str, Any] = {}
    surroundings = partial(_unchanged, trial, observer, facts)
    run_logged(subject.script, arguments, log, own_group=False, surroundings=surroundings)
    if observer.rank == 0:
        bits = bool(trial.requires_bits)
        facts["files"] = describe_files(trial.folder, scratch, start, bits=bits)
    return facts


@contextmanager
def _unchanged(trial: Trial, observer: Observer, facts: dict[str, Any]) -> Iterator[None]:
    """Give an unchanged script what it needs, and observe it, during the block.

    A script in plain Python needs nothing. `facts` receives how data were read.
    """
    reduction: Reduction = "exact" if trial.requires_bits else "fast"
    seed_generators(0)  # scripts without seeds can be compared
    with ExitStack() as stack:
        stack.enter_context(recorded_files(trial.folder, trial.scratch))
        summary = Summary({})
        if trial.processes != PLAIN:
            summary = stack.enter_context(unchanged(reduction))
        # After `unchanged`, so that the observer surrounds the division of a call.
        observer.observe_calls({"strategy": None, "reduction": reduction, "batch_norm": "global"})
        try:
            yield
        finally:
            facts["draws"] = any(reading.state.draws for reading in summary.readings.values())
            facts["readings"] = list(summary.data_lines())
