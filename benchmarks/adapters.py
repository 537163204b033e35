"""Time of a step with each adapter, relative to the framework itself with DDP, in the same two processes.

Both compute equal batches: the adapter has one microbatch per process. They take turns of one short training each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from adapters_ranks import BATCH, PROCESSES, TURNS
from machine import Spread, describe_machine, machine_line, markdown_table, save
from step_models import MODELS

HERE = Path(__file__).parent


def measure(framework: str, model: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return medians in milliseconds, and ratios within a round."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
        settings = ["--model", model, "--rounds", str(rounds), "--steps", str(steps)]
        script = str(HERE / "adapters_ranks.py")
        subprocess.run([sys.executable, *launcher, script, framework, str(output), *settings], check=True)
        times = json.loads(output.read_text(encoding="utf-8"))
    row: dict[str, Any] = {"framework": framework, "model": model}
    for index, kind in enumerate(("wall", "cpu")):
        framework_ms, adapter_ms = ([turn[index] for turn in times[name]] for name in ("framework", "adapter"))
        ratios = [ours / theirs for ours, theirs in zip(adapter_ms, framework_ms, strict=True)]
        row[kind] = {
            "framework": Spread.of(framework_ms).rounded(2),
            "adapter": Spread.of(adapter_ms).rounded(2),
            "ratio": Spread.of(ratios).rounded(3),
        }
    return row


def _cells(row: dict[str, Any]) -> list[str]:
    ratios = [row[kind]["ratio"] for kind in ("wall", "cpu")]
    return [
        row["framework"],
        row["model"],
        *(f"{row['wall'][name]['median']:.1f}" for name in ("framework", "adapter")),
        *(f"{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f})" for ratio in ratios),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/adapters.py --frameworks Lightning --rounds 5",
    )
    parser.add_argument("--frameworks", nargs="+", choices=TURNS, default=list(TURNS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of each turn, at most 28 (default: 20)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "adapters.json")
    options = parser.parse_args()
    machine = describe_machine()
    results = [
        measure(framework, model, options.rounds, options.steps)
        for model in options.models
        for framework in options.frameworks
    ]
    header = ["framework", "model", "framework, ms", "adapter, ms", "ratio", "ratio of processor time"]
    text = markdown_table(header, [_cells(row) for row in results])
    print(text)
    title = f"# Time of a step with an adapter\n\n{machine_line(machine)}\n\n"
    settings = {"rounds": options.rounds, "steps": options.steps, "batch_size": BATCH, "processes": PROCESSES}
    page = (
        f"{title}{PROCESSES} processes, global batch {BATCH}, one microbatch and one thread per process, "
        f"{options.rounds} rounds. Medians and quartiles;\nratios are taken within a round. Processor time is that of "
        f"rank 0.\n\n{text}\n"
    )
    save(options.output, {"machine": machine, "settings": settings, "results": results}, page)


if __name__ == "__main__":
    main()
