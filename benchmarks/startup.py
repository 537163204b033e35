"""Seconds from the command to the end of the first optimizer step, at several numbers of processes.

The same small net on the same data, started by `samestep train`, by `samestep.launch`, by torchrun (a hand-written
DDP loop) and by `accelerate launch` (its own loop). Contenders take turns; ratios are taken pair by pair within a turn.
`samestep resume` continues a run that was interrupted before, up to the end of its next step. `samestep --help` is
timed on its own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from machine import Spread, describe_machine, machine_line, markdown_table, save
from run_events import first_step_event, step_event_after

HERE = Path(__file__).parent
SCRIPTS = HERE / "startup_scripts"
OURS, OURS_LATE, COMMAND = "samestep.launch", "samestep.launch, late torch", "samestep train"
RESUME = "samestep resume"
PEERS = ("torchrun", "accelerate")
POLL_SECONDS = 0.002

Turn = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """One way to start.

    Attributes:
        command: from the number of processes and the file for the mark to the arguments of the program.
        first_step: the time of the first step, from the folder the command runs in, or None if it is not done yet.
        prepare: called before, with the number of processes, the folder and the environment.
    """

    name: str
    command: Callable[[int, Path], list[str]]
    first_step: Callable[[Path, int], float | None]
    prepare: Callable[[int, Path, dict[str, str]], None] = lambda processes, folder, environment: None


def script(name: str) -> str:
    return str(SCRIPTS / f"{name}.py")


def tool(name: str) -> str:
    """A command of the environment that this Python belongs to."""
    return str(Path(sys.executable).parent / name)


def samestep_command(file: str, processes: int, mark: Path) -> list[str]:
    return [sys.executable, script(file), str(mark), str(processes)]


def torchrun_command(processes: int, mark: Path) -> list[str]:
    return [tool("torchrun"), "--standalone", "--nproc-per-node", str(processes), script("with_ddp"), str(mark)]


def accelerate_command(processes: int, mark: Path) -> list[str]:
    # Without MPI `accelerate launch --cpu` starts one process with any --num_processes. Its launcher for several
    # devices starts the requested number, and the script selects the CPU.
    kind = ["--cpu"] if processes == 1 else ["--multi_gpu"]
    fixed = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    count = ["--num_processes", str(processes)]
    return [tool("accelerate"), "launch", *kind, *count, *fixed, script("with_accelerate"), str(mark)]


def train_command(processes: int, mark: Path) -> list[str]:
    recipe = str(SCRIPTS / "workload.yaml")
    return [tool("samestep"), "train", recipe, "--processes", str(processes), f"microbatches={processes}"]


def interrupt_run(processes: int, folder: Path, environment: dict[str, str]) -> None:
    """Train in `folder`, stop after the first step, and write the time to the mark."""
    command = [*train_command(processes, folder / "mark"), "epochs=1000"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while first_step_event(folder, processes) is None:
        if process.poll() is not None:
            raise SystemExit(f"error: {shlex.join(command)} ended with {process.returncode} before its first step")
        time.sleep(POLL_SECONDS)
    process.terminate()  # the command saves a checkpoint
    process.wait()
    (folder / "interrupted").write_text(str(time.time()))


def resume_command(processes: int, mark: Path) -> list[str]:
    (run,) = (mark.parent / "runs").iterdir()
    return [tool("samestep"), "resume", str(run), "--processes", str(processes)]


def resumed_step(folder: Path, processes: int) -> float | None:
    return step_event_after(folder, float((folder / "interrupted").read_text()))


def mark_time(folder: Path, processes: int) -> float | None:
    """Return the time that `first_step_done` wrote, or None; refuse a script with another number of processes."""
    mark = folder / "mark"
    fields = mark.read_text().split() if mark.exists() else []
    if len(fields) < 2:
        return None
    if int(fields[1]) != processes:
        raise SystemExit(f"error: {processes} processes were requested, but the script ran in {fields[1]}")
    return float(fields[0])


def contenders() -> list[Contender]:
    return [
        Contender(COMMAND, train_command, first_step_event),
        Contender(RESUME, resume_command, resumed_step, interrupt_run),
        Contender(OURS, partial(samestep_command, "with_samestep"), mark_time),
        Contender(OURS_LATE, partial(samestep_command, "with_samestep_late"), mark_time),
        Contender("torchrun", torchrun_command, mark_time),
        Contender("accelerate", accelerate_command, mark_time),
    ]


def time_to_first_step(contender: Contender, processes: int, timeout: float) -> float:
    """Start the contender in an empty folder, wait for its first step, and see it to its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(SCRIPTS)}
        # As in a package that pip has installed, modules are compiled, from the second turn on.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        contender.prepare(processes, folder, environment)
        command = contender.command(processes, folder / "mark")
        with (folder / "output").open("wb") as output:
            began = time.time()
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            done = _wait_for_first_step(contender, process, folder, processes, began + timeout)
            _see_to_end(process)
        finally:
            _kill_group(process)
        if done is None:
            tail = "\n".join((folder / "output").read_text(errors="replace").splitlines()[-15:])
            raise SystemExit(f"error: no first step after {timeout:.0f} s of {shlex.join(command)}\n{tail}")
        return done - began


def _wait_for_first_step(
    contender: Contender, process: subprocess.Popen[bytes], folder: Path, processes: int, deadline: float
) -> float | None:
    while time.time() < deadline:
        has_ended = process.poll() is not None
        done = contender.first_step(folder, processes)
        if done is not None or has_ended:
            return done
        time.sleep(POLL_SECONDS)
    return None


def _see_to_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a script, which ends after one step, or stop a complete training."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            process.wait()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def take_turns(found: list[Contender], processes: int, repeats: int, timeout: float) -> Iterator[Turn]:
    """`repeats` turns of all contenders, after one that only warms the file cache; each begins one further on."""
    for turn in range(-1, repeats):
        shift = turn % len(found)
        times = {}
        for contender in [*found[shift:], *found[:shift]]:
            times[contender.name] = time_to_first_step(contender, processes, timeout)
        if turn >= 0:
            print(f"  {processes} processes, turn {turn + 1}: " + _shown(times), flush=True)
            yield times


def _shown(times: Turn) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in sorted(times.items()))


def summarise(processes: int, names: list[str], turns: list[Turn]) -> dict[str, Any]:
    """Medians and, for each row of ours, the ratios to each peer."""
    ours = [name for name in names if name not in PEERS]
    return {
        "processes": processes,
        "seconds": {name: Spread.of([turn[name] for turn in turns]).rounded(3) for name in names},
        "ratios": {
            name: {peer: Spread.of([turn[name] / turn[peer] for turn in turns]).rounded(3) for peer in PEERS}
            for name in ours
        },
        "turns": [{name: round(seconds, 3) for name, seconds in turn.items()} for turn in turns],
    }


def table(results: list[dict[str, Any]]) -> str:
    header = ["processes", "started by", "seconds, median (min to max)", *(f"ratio to {peer}" for peer in PEERS)]
    rows = []
    for result in results:
        for name, seconds in result["seconds"].items():
            ratios = result["ratios"].get(name)
            cells = [f"{ratios[peer]['median']:.2f}" if ratios else "" for peer in PEERS]
            shown = f"{seconds['median']:.2f} ({seconds['least']:.2f} to {seconds['most']:.2f})"
            rows.append([str(result["processes"]), name, shown, *cells])
    return markdown_table(header, rows)


def help_seconds(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds, and processor seconds, of `samestep --help`."""
    seconds, processor = [], []
    for _ in range(repeats + 1):
        before, began = os.times(), time.perf_counter()
        subprocess.run([tool("samestep"), "--help"], stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        seconds.append(time.perf_counter() - began)
        children = (after.children_user + after.children_system, before.children_user + before.children_system)
        processor.append(children[0] - children[1])
    return {
        "seconds": Spread.of(seconds[1:]).rounded(3),
        "processor": Spread.of(processor[1:]).rounded(3),
    }


def page(
    machine: dict[str, Any], repeats: int, results: list[dict[str, Any]], help_text: dict[str, dict[str, float]]
) -> str:
    return (
        "# From the command to the end of the first step\n\n"
        f"{machine_line(machine)}\n\n"
        f"{repeats} turns in which the contenders alternate, after one that is not counted. Ratios are medians over\n"
        "turns of ours divided by the peer's; below 1 ours is sooner. `late torch` is a script whose first process\n"
        "does not import torch.\n\n"
        f"{table(results)}\n\n"
        "`samestep resume` continues a run that was stopped after its first step; its ratios are to the first\n"
        "step of a new run of the peer. "
        f"`samestep --help` takes {help_text['seconds']['median']:.3f} s "
        f"({help_text['processor']['median']:.3f} s of the processor), medians of {repeats}.\n"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/startup.py --processes 1 2 4 --repeats 5",
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count (default: 5)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds to wait for a first step (default: 120)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "startup.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    machine = describe_machine()
    found = contenders()
    names = [contender.name for contender in found]
    results = []
    for processes in options.processes:
        turns = list(take_turns(found, processes, options.repeats, options.timeout))
        results.append(summarise(processes, names, turns))
    settings, help_text = {"repeats": options.repeats}, help_seconds(options.repeats)
    save(
        options.output,
        {"machine": machine, "settings": settings, "results": results, "help": help_text},
        page(machine, options.repeats, results, help_text),
    )
    print(f"\n{table(results)}\n\nwritten to {options.output} and {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
