"""Output of the programs in `examples/pitfalls`: mistakes with DDP, measured on processes with gloo."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from machine import describe_machine, machine_line, save

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE.parent / "examples" / "pitfalls").glob("*.py"))


def output_of(program: Path) -> str:
    """Run a program, and return what it prints.

    Raises:
        subprocess.CalledProcessError: the program failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, program], env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "pitfalls.json")
    options = parser.parse_args()
    machine = describe_machine()
    printed = {program.stem: output_of(program) for program in PROGRAMS}
    parts = [f"## `examples/pitfalls/{name}.py`\n\n```text\n{text}```\n" for name, text in printed.items()]
    page = "\n".join(
        ["# Measured mistakes\n", f"{machine_line(machine)}\n", "Written by `python benchmarks/pitfalls.py`.\n", *parts]
    )
    save(options.output, {"machine": machine, "printed": printed}, page)


if __name__ == "__main__":
    main()
