"""A run of 10,000 steps on 2 processes, with checkpoints, evaluation, logs and restarts: does anything grow?

Every 1,000 steps the script reads memory, open files and threads of the launcher and of the ranks, and the size of the
run directory. A rank is killed twice in the first half; the run restarts from its newest checkpoint. In the second half
nothing may grow, except for the log, by the lines of its steps.

    python benchmarks/long_run.py --output benchmarks/results/long_run.json

With `--place FOLDER --seconds 500` each call continues the run by `samestep resume`, until it has all steps.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from machine import describe_machine, machine_line, markdown_table, save

PROCESSES = 2
SMALL = ("model.options.width=8", "data.options.shift=0")  # the figures do not depend on them
ALLOWED_MIB = 5.0  # that an allocator takes in half of a run
LOG_BYTES_PER_STEP = 1024
READINGS = 5  # a checkpoint or an evaluation may be in progress
COPY_THREADS = 3  # a process with fewer threads is a copy that a rank has made to read a sample


@dataclass(frozen=True)
class Figures:
    """Figures of a run after a number of steps: of the launcher, of all ranks together, and of the run directory."""

    step: int
    restarts: int
    seconds: float
    launcher_mib: float
    ranks_mib: float
    launcher_files: float
    ranks_files: float
    threads: float
    checkpoints: int
    checkpoints_kib: float
    logs_kib: float


class LongRun:
    """A run of digits in a folder; `ranks` has its processes with a rank."""

    def __init__(self, place: Path, rows: list[Figures]) -> None:
        self.run = place / "runs/long"
        self.restarts = 0
        self._began = time.monotonic()
        if rows:
            self.restarts = rows[-1].restarts + 1
            self._began -= rows[-1].seconds
        options = ("--processes", str(PROCESSES), "--max-restarts", "5", "--checkpoint-every", "50", "--keep", "3")
        begin = ("train", "digits", "--name", "long", "batch_size=16", "epochs=1000", *SMALL)
        if rows:
            begin = ("resume", "runs/long")
        self.errors = place / "errors"
        with self.errors.open("wb") as errors:
            self.launcher = psutil.Popen(
                [sys.executable, "-m", "samestep", *begin, *options],
                cwd=place,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def ranks(self) -> list[psutil.Process]:
        """Return the processes with a rank: forks of the fork server, with threads of process groups."""
        forks = [fork for child in self.launcher.children() for fork in child.children()]
        return [fork for fork in forks if fork.num_threads() > COPY_THREADS]

    def step(self) -> int:
        """Return the newest step in the log."""
        try:
            with (self.run / "events.jsonl").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - 8192))
                lines = file.read().split(b"\n")[1:-1]
        except FileNotFoundError:
            return 0
        steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]
        return max(steps, default=0)

    def wait_for(self, step: int) -> None:
        """Wait until the log has a step; the run must continue."""
        while self.step() < step:
            if self.launcher.poll() is not None:
                raise RuntimeError(f"the run ended before step {step}:\n{self.errors.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill_rank(self) -> None:
        """Kill the last rank by SIGKILL."""
        self.ranks()[-1].kill()
        self.restarts += 1

    def read(self) -> Figures:
        """Return the medians of several readings."""
        rows: list[list[float]] = []
        while len(rows) < READINGS:
            try:
                ranks = self.ranks()
                memory = [process.memory_info().rss / 2**20 for process in ranks]
                files = [process.num_fds() for process in ranks]
                threads = [process.num_threads() for process in ranks]
            except psutil.NoSuchProcess:
                continue
            own = self.launcher.memory_info().rss / 2**20
            rows.append([own, sum(memory), self.launcher.num_fds(), sum(files), sum(threads)])
            time.sleep(0.3)
        own, memory_of_ranks, own_files, files_of_ranks, all_threads = map(statistics.median, zip(*rows, strict=True))
        checkpoints = self.run / "checkpoints"
        logs = sum(path.stat().st_size for path in self.run.rglob("*.jsonl"))
        return Figures(
            step=self.step(),
            restarts=self.restarts,
            seconds=round(time.monotonic() - self._began, 1),
            launcher_mib=round(own, 1),
            ranks_mib=round(memory_of_ranks, 1),
            launcher_files=own_files,
            ranks_files=files_of_ranks,
            threads=all_threads,
            checkpoints=len(list(checkpoints.glob("step-*"))),
            checkpoints_kib=round(_bytes_below(checkpoints) / 1024, 1),
            logs_kib=round(logs / 1024, 1),
        )


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
        except FileNotFoundError:
            continue  # an older checkpoint, which is removed
    return total


def growth(first: Figures, last: Figures) -> list[str]:
    """Return what has grown between two figures, as text."""
    grown = []
    for name in ("launcher_mib", "ranks_mib"):
        more = getattr(last, name) - getattr(first, name)
        if more > ALLOWED_MIB:
            grown.append(f"{name}: {more:.1f} more")
    for name in ("launcher_files", "ranks_files", "threads", "checkpoints"):
        more = getattr(last, name) - getattr(first, name)
        if more > 0:
            grown.append(f"{name}: {more:g} more")
    per_step = 1024 * (last.logs_kib - first.logs_kib) / (last.step - first.step)
    if per_step > LOG_BYTES_PER_STEP:
        grown.append(f"logs: {per_step:.0f} bytes per step")
    return grown


def page(machine: dict[str, Any], rows: list[Figures], grown: list[str], per_step: float) -> str:
    header = (
        *("steps", "restarts", "seconds", "launcher, MiB", "ranks, MiB", "files of the launcher", "files of the ranks"),
        *("threads of the ranks", "checkpoints", "checkpoints, KiB", "logs, KiB"),
    )
    table = markdown_table(header, [[f"{value:g}" for value in asdict(row).values()] for row in rows])
    verdict = "nothing"
    if grown:
        verdict = "; ".join(grown)
    return (
        f"# Figures of a long run\n\n{machine_line(machine)}\n\n"
        f"`digits` on {PROCESSES} processes, batches of 16, a checkpoint every 50 steps (3 are kept), an\n"
        "evaluation in each epoch of 90 steps; two ranks were killed. Medians of 5 readings; memory is resident,\n"
        f"with pages that ranks share.\n\n{table}\n\n"
        f"Grown in the second half: {verdict}. Logs have {per_step:.0f} bytes per step.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--place", type=Path, help="folder of a run that several calls continue")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which a call stops the run")
    arguments = parser.parse_args()
    interval = arguments.steps // 10
    machine = describe_machine()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        place = arguments.place or Path(temporary)
        place.mkdir(exist_ok=True)
        kept = place / "rows.json"
        rows: list[Figures] = []
        if kept.exists():
            rows = [Figures(**row) for row in json.loads(kept.read_text())]
        run = LongRun(place, rows)
        try:
            for number in range(len(rows) + 1, 11):
                if number in (3, 5):
                    run.wait_for(number * interval - interval // 2)
                    run.kill_rank()
                run.wait_for(number * interval)
                rows.append(run.read())
                print(rows[-1], flush=True)
                kept.write_text(json.dumps([asdict(row) for row in rows]))
                if time.monotonic() - began > arguments.seconds:
                    break
            run.launcher.send_signal(signal.SIGTERM)
            code = run.launcher.wait(60)
        finally:
            if run.launcher.poll() is None:
                run.launcher.kill()
        if code != 130:
            raise RuntimeError(f"exit code {code}:\n{run.errors.read_text()[-2000:]}")
    if len(rows) < 10:
        return
    first, last = rows[5], rows[-1]
    grown = growth(first, last)
    per_step = 1024 * (last.logs_kib - first.logs_kib) / (last.step - first.step)
    print("grown:", grown or "nothing")
    if arguments.output:
        result = {"machine": machine, "results": [asdict(row) for row in rows], "grown": grown}
        save(arguments.output, result, page(machine, rows, grown, per_step))
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
