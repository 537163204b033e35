"""Worker process of a trial: runs the subject as one rank under observation."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from samestep.errors import EXIT_FAILED
from samestep.launcher.job import process_state, rank_and_size
from samestep.launcher.worker import run_script
from samestep.tools.verify.interventions import apply_to_process
from samestep.tools.verify.loading import observe_loaders
from samestep.tools.verify.observer import Observer
from samestep.tools.verify.trials import Subject, Trial


def run(subject: Subject, trial: Trial) -> None:
    """Run the subject as one rank and record its results."""
    rank, size = rank_and_size()
    apply_to_process(trial.interventions, trial.folder, rank)
    with (trial.folder / f"rank-{rank}.jsonl").open("a") as file:
        observer = Observer(trial, rank, size, file)
        observer.install()
        observe_loaders(observer.add_batch)
        process_state.is_experiment = True
        _watch_progress(observer, trial.patience)
        try:
            _run_script(subject, trial, trial.folder / f"output-{rank}.log")
        except BaseException:
            observer.end("unfinished")
            raise
        process_state.source_files.note_imports()
        observer.end("end", sources=process_state.source_files.hashes)


def _run_script(subject: Subject, trial: Trial, log: Path) -> None:
    """Run the script as `samestep run` does, with standard output in a file."""
    assert subject.script is not None
    process_state.checkpoint_root = scratch = trial.scratch.resolve()
    arguments = tuple(argument.replace("{folder}", str(scratch)) for argument in subject.arguments)
    with log.open("a") as output, contextlib.redirect_stdout(output):
        run_script(subject.script, arguments, own_group=False)


def _watch_progress(observer: Observer, patience: float) -> None:
    """End this process after `patience` seconds without an event; ranks that wait for each other do not end."""

    def watch() -> None:
        while (idle := time.monotonic() - observer.last_event) < patience:
            time.sleep(patience - idle + 0.01)
        observer.write("stuck", {"seconds": patience})
        print(f"no progress for {patience:g} s", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="samestep-verify-watch", daemon=True).start()
