"""Counts alarms of correct scripts on 1 and 3 processes: errors, other numbers, and lines that plain Python lacks.

    PYTHONPATH=src:tests:. python -m benchmarks.false_alarms                  # all; an hour on two cores
    PYTHONPATH=src:tests:. python -m benchmarks.false_alarms plain_loop --names layer_lazy,loss_ohem

Kinds: `plain_loop` (scripts of tests/plain_loop without an expected error), `planted` (`right_*.py` of tests/planted),
`scripts` (tests/scripts) and `recipes` (the shipped one that needs no data of the user). The verdict on a module,
divided or whole with its reason, is no alarm.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("plain_loop", "planted", "scripts", "recipes")
PROCESSES = (1, 3)
RECIPES = ("digits",)
_VERDICT = re.compile(r"calls divided between|calls computed whole|it imports samestep|calls of its models are divided")
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
        alarms = [line for line in lines if line not in plain and not _VERDICT.search(line)]
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
    return {path.stem: ["run", str(path)] for path in sorted((ROOT / "tests").glob(pattern))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 without alarms."""
    parser = argparse.ArgumentParser(prog="benchmarks.false_alarms")
    parser.add_argument("kinds", nargs="*", default=KINDS, help=f"of {', '.join(KINDS)}; all if none")
    parser.add_argument("--names", default="", help="names of scripts of one kind")
    options = parser.parse_args(arguments)
    names = [name for name in options.names.split(",") if name]
    scripts = runs = with_alarms = 0
    with tempfile.TemporaryDirectory(prefix="false-alarms-") as temporary:
        for kind in options.kinds:
            folder = Path(temporary) / kind
            folder.mkdir()
            if kind == "plain_loop":
                results = list(alarms_of_plain_loop(names, folder))
            else:
                results = []
                for name, (command, *rest) in commands(kind).items():
                    for number in PROCESSES:
                        if not names or name in names:
                            text = [command, "--processes", str(number), *rest]
                            results.append((name, number, alarms_of_command(text, folder)))
            for name, number, alarms in results:
                if alarms:
                    print(f"{kind}/{name} on {number}: {alarms[:3]}", flush=True)
            scripts += len({name for name, *_ in results})
            runs += len(results)
            with_alarms += sum(bool(alarms) for *_, alarms in results)
            print(f"{kind}: {len({name for name, *_ in results})} scripts, {len(results)} runs", flush=True)
    print(f"{scripts} scripts, {runs} runs on 1 and 3 processes, {with_alarms} with alarms")
    return 3 if with_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
