"""Counts alarms of correct scripts on 1 and 3 processes: errors, other numbers, and lines that plain Python lacks.

    PYTHONPATH=src:tests:. python -m benchmarks.false_alarms                  # all; an hour on two cores
    PYTHONPATH=src:tests:. python -m benchmarks.false_alarms plain_loop --names layer_lazy,loss_ohem

Kinds: `plain_loop` (scripts of tests/plain_loop without an expected error), `planted` (`right_*.py` of tests/planted),
`scripts` (tests/scripts) and `recipes` (the shipped one that needs no data of the user). The verdict on a module
or a loader, divided or whole with its reason, is no alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, machine_line, markdown_table, save

ROOT = Path(__file__).parents[1]
KINDS = ("plain_loop", "planted", "scripts", "recipes")
PROCESSES = (1, 3)
RECIPES = ("digits",)
_VERDICT = re.compile(
    "calls divided between|calls computed whole|batches read whole|it imports samestep|calls of its models are divided"
)
_PLACE = re.compile(r"^\S+:\d+: (?=\w+Warning: )")  # of a warning
_ALARM = re.compile(r"\[E_\w+\]|\bwarning\b", re.IGNORECASE)


def alarms_of_plain_loop(names: Sequence[str], folder: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Yield script, number of processes and alarms; what plain Python prints on standard error is no alarm."""
    from plain_loop.forks import preload
    from plain_loop.runner import run_scripts
    from plain_loop.script import find_scripts

    found = [script for script in find_scripts(list(names)) if script.expected != "error" and not script.missing]
    preload(found)
    verdicts = run_scripts(found, PROCESSES, slots=3, keep=folder)
    for verdict in verdicts:
        lines = _lines(folder / f"{verdict.script}.{verdict.processes}" / "err0")
        plain = _lines(folder / f"{verdict.script}.plain" / "err0")
        known = {_PLACE.sub("", line) for line in plain}
        alarms = [line for line in lines if _PLACE.sub("", line) not in known and not _VERDICT.search(line)]
        alarms = [line for line in alarms if not line.startswith("  ")]  # code of a warning or a stack
        if not verdict.passed:
            alarms.insert(0, verdict.problem.splitlines()[0])
        yield verdict.script, verdict.processes, alarms


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def alarms_of_command(command: Sequence[str], cwd: Path) -> list[str]:
    """Run a command of samestep, and return its alarms."""
    variables = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "samestep", *command]
    done = subprocess.run(run, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if _ALARM.search(line) and "Warning:" not in line]
    if done.returncode and not lines:
        lines = [f"exit code {done.returncode}", *done.stderr.splitlines()[-1:]]
    return lines


def commands(kind: str) -> dict[str, list[str]]:
    """Return a command for each script of a kind, without the number of processes."""
    if kind == "recipes":
        return {name: ["train", name, "epochs=1"] for name in RECIPES}
    pattern = "planted/right_*.py" if kind == "planted" else "scripts/*.py"
    found = {path.stem: ["run", str(path)] for path in sorted((ROOT / "tests").glob(pattern))}
    if "right_resume" in found:
        found["right_resume"].append("checkpoints")  # its folder
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 without alarms."""
    parser = argparse.ArgumentParser(prog="benchmarks.false_alarms")
    parser.add_argument("kinds", nargs="*", default=KINDS, help=f"of {', '.join(KINDS)}; all if none")
    parser.add_argument("--names", default="", help="names of scripts of one kind")
    parser.add_argument(
        "--output", type=Path, help="JSON file, with a page in the same folder; other kinds in it stay (default: print)"
    )
    options = parser.parse_args(arguments)
    names = [name for name in options.names.split(",") if name]
    measured: dict[str, Any] = {"kinds": {}, "alarms": []}
    if options.output is not None and options.output.exists():
        measured = json.loads(options.output.read_text(encoding="utf-8"))
    measured["machine"] = describe_machine()
    with tempfile.TemporaryDirectory(prefix="false-alarms-") as temporary:
        for kind in options.kinds:
            folder = Path(temporary) / kind
            folder.mkdir()
            runs = 0
            scripts = set()
            measured["alarms"] = [alarm for alarm in measured["alarms"] if not alarm[0].startswith(f"{kind}/")]
            for name, processes, alarms in results(kind, names, folder):
                scripts.add(name)
                runs += 1
                if alarms:
                    print(f"{kind}/{name} on {processes}: {alarms[:3]}", flush=True)
                    measured["alarms"].append([f"{kind}/{name}", processes, alarms[0]])
            print(f"{kind}: {len(scripts)} scripts, {runs} runs", flush=True)
            measured["kinds"][kind] = {"scripts": len(scripts), "runs": runs}
            if options.output is not None:
                save(options.output, measured, page(measured))
    return 3 if measured["alarms"] else 0


def results(kind: str, names: Sequence[str], folder: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Run the scripts of a kind; yield script, number of processes and alarms."""
    if kind == "plain_loop":
        yield from alarms_of_plain_loop(names, folder)
        return
    for name, (command, *rest) in commands(kind).items():
        if names and name not in names:
            continue
        for processes in PROCESSES:
            yield name, processes, alarms_of_command([command, "--processes", str(processes), *rest], folder)


def page(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    kinds = measured["kinds"]
    rows = [[kind, str(counts["scripts"]), str(counts["runs"])] for kind, counts in kinds.items()]
    rows.append(["all", *(str(sum(counts[name] for counts in kinds.values())) for name in ("scripts", "runs"))])
    alarms = [[name, str(processes), f"`{alarm}`"] for name, processes, alarm in measured["alarms"]]
    parts = [
        "# Alarms of correct scripts",
        machine_line(measured["machine"]),
        "Each script ran on 1 and 3 processes. An alarm is an error, another number than that of the plain loop, or a "
        "line that\nplain Python does not print.",
        markdown_table(["kind", "scripts", "runs"], rows),
        f"Alarms: {len(alarms)}.",
    ]
    if alarms:
        parts.append(markdown_table(["script", "on", "alarm"], alarms))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
