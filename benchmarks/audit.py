"""Time that `samestep audit` adds to a step: two processes of one training loop, of which one is observed.

The processes take turns of some steps, so that the load of the machine affects both. Times are processor times of a
process, without waits for the processor. The first 50 steps are observed one by one, later ones every 50th.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from machine import Spread, describe_machine, machine_line, markdown_table, save

from samestep.tools.audit.audit import install_hooks

HERE = Path(__file__).parent
OBSERVED = 50  # steps that are observed one by one


class Worker:
    """One process of the training loop, observed or not."""

    def __init__(self, folder: Path, batch: int, *, is_observed: bool) -> None:
        audit = folder / "events"
        audit.mkdir(exist_ok=True)
        (audit / "settings.json").write_text(json.dumps({"steps": OBSERVED, "without": []}))
        variables = {**os.environ, **({"SAMESTEP_AUDIT": str(audit)} if is_observed else {})}
        command = [sys.executable, HERE / "audit_worker.py", folder / f"rendezvous-{is_observed}", str(batch)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True)

    def turn(self, steps: int) -> float:
        """Return milliseconds of processor time per step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        return 1000 * float(self._process.stdout.readline().split()[0]) / steps

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(batch: int, later: int) -> dict[str, list[list[float]]]:
    """Return the times of each turn without and with the audit, for the first steps and for later ones."""
    with tempfile.TemporaryDirectory() as name:
        plain, observed = workers = [Worker(Path(name), batch, is_observed=flag) for flag in (False, True)]
        times: dict[str, list[list[float]]] = {"first": [], "later": []}
        for worker in workers:
            worker.turn(1)  # the first step allocates
        turns = [("first", 1)] * (OBSERVED - 1) + [("later", 5)] * (later // 5)
        for number, (phase, steps) in enumerate(turns):
            if number % 2:
                pair = [plain.turn(steps), observed.turn(steps)]
            else:
                pair = [observed.turn(steps), plain.turn(steps)][::-1]
            times[phase].append(pair)
        for worker in workers:
            worker.end()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/audit.py --rounds 1",
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs of processes (default: 3)")
    parser.add_argument("--later", type=int, default=150, help="steps after the first 50 (default: 150)")
    parser.add_argument("--batch", type=int, default=3, help="samples of a step (default: 3)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "audit.json")
    options = parser.parse_args()
    machine = describe_machine()
    install_hooks(Path(sysconfig.get_path("purelib")))
    rounds = [measure(options.batch, options.later) for _ in range(options.rounds)]
    results: list[dict[str, Any]] = []
    for phase in ("first", "later"):
        pairs = [pair for times in rounds for pair in times[phase]]
        values = {
            "plain": [plain for plain, _ in pairs],
            "observed": [observed for _, observed in pairs],
            "added": [observed - plain for plain, observed in pairs],
            "ratio": [observed / plain for plain, observed in pairs],
        }
        results.append({"steps": phase, **{key: Spread.of(value).rounded(4) for key, value in values.items()}})
    header = ["steps", "without audit, ms", "with audit, ms", "added, ms", "ratio", "quartiles of the ratio"]
    names = {"first": f"the first {OBSERVED}", "later": "later"}
    rows = []
    for row in results:
        cells = [f"{row[key]['median']:.2f}" for key in ("plain", "observed", "added")]
        ratio = row["ratio"]
        rows.append([names[row["steps"]], *cells, f"{ratio['median']:.3f}", f"{ratio['q1']:.3f} to {ratio['q3']:.3f}"])
    text = markdown_table(header, rows)
    print(text)
    title = f"# Time that an audit adds to a step\n\n{machine_line(machine)}\n\n"
    note = f"Medians of turns in {options.rounds} pairs of processes; processor time of one process and one thread.\n\n"
    settings = {"rounds": options.rounds, "later": options.later, "batch": options.batch}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, f"{title}{note}{text}\n")


if __name__ == "__main__":
    main()
