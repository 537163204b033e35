"""Equality of one training on several numbers of processes, in Samestep and in other tools.

Each tool trains the same net on the same data with its own seeding, data order, scaling and evaluation, on 1, 2, 3 and
4 processes with gloo. The weights are compared to those of the same tool on one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, machine_line, markdown_table, save

HERE = Path(__file__).parent
SCRIPTS = HERE / "peers_scripts"
DROPOUTS = (0.2, 0.0)

Weights = dict[str, torch.Tensor]
Training = tuple[dict[str, Any], Weights]


@dataclass(frozen=True)
class Tool:
    """One way to train.

    Attributes:
        script: file name in `peers_scripts`, without suffix.
        torchrun: whether torchrun starts the processes, otherwise the script.
        options: further options of the script.
    """

    name: str
    script: str
    torchrun: bool = False
    options: tuple[str, ...] = ()

    def command(self, output: Path, processes: int, dropouts: Sequence[float]) -> list[str]:
        """Return the command that trains once per dropout."""
        torchrun = str(Path(sys.executable).parent / "torchrun")
        start = [torchrun, "--standalone", "--nproc-per-node", str(processes)] if self.torchrun else [sys.executable]
        script = [str(SCRIPTS / f"{self.script}.py"), str(output)]
        return [*start, *script, "--processes", str(processes), "--dropout", *map(str, dropouts), *self.options]


TOOLS = (
    Tool("Samestep, exact", "with_samestep", options=("--reduction", "exact")),
    Tool("Samestep, fast", "with_samestep", options=("--reduction", "fast")),
    Tool("DDP", "with_ddp", torchrun=True),
    Tool("Accelerate", "with_accelerate", torchrun=True),
    Tool("Accelerate, drop_last", "with_accelerate", torchrun=True, options=("--drop-last",)),
    Tool("Lightning Trainer", "with_lightning"),
    Tool("Lightning Fabric", "with_fabric"),
    Tool("Hugging Face Trainer", "with_hf_trainer", torchrun=True),
)


def run(tool: Tool, processes: int, dropouts: Sequence[float], timeout: float) -> list[Training]:
    """Train once per dropout in new processes, and return the reports and the weights.

    Raises:
        SystemExit: the run failed, timed out, or had another number of processes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = tool.command(folder, processes, dropouts)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(SCRIPTS)}
        with (folder / "output").open("wb") as lines:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=lines, stderr=lines, start_new_session=True
            )
            try:
                status: int | str = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = f"none after {timeout:.0f} s"
            finally:
                _kill_group(process)
        if status != 0:
            tail = "\n".join((folder / "output").read_text(errors="replace").splitlines()[-40:])
            raise SystemExit(f"error: exit status {status} of {shlex.join(command)}\n{tail}")
        return [_read_training(folder, processes, dropout) for dropout in dropouts]


def _read_training(folder: Path, processes: int, dropout: float) -> Training:
    report = json.loads((folder / f"{dropout}.json").read_text())
    if report["processes"] != processes:
        raise SystemExit(f"error: the script ran in {report['processes']} processes, expected {processes}")
    return report, torch.load(folder / f"{dropout}.pt", weights_only=True)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        process.wait()


def relative_difference(weights: Weights, reference: Weights) -> float:
    """Return the largest absolute difference in a tensor relative to its largest value; maximum over tensors."""
    return max(((weights[name] - tensor).abs().max() / tensor.abs().max()).item() for name, tensor in reference.items())


def measure(tool: Tool, counts: Sequence[int], timeout: float) -> list[dict[str, Any]]:
    """Train on each number of processes, and compare the weights to those on the first."""
    results = []
    references: list[Training] = []
    for processes in counts:
        trainings = run(tool, processes, DROPOUTS, timeout)
        references = references or trainings
        for dropout, (report, weights), (_, reference) in zip(DROPOUTS, trainings, references, strict=True):
            difference = relative_difference(weights, reference)
            results.append({"tool": tool.name, "dropout": dropout, **report, "difference": difference})
            print(f"  {results[-1]}", flush=True)
    return results


def is_repeatable(tool: Tool, result: dict[str, Any], timeout: float) -> bool:
    """Train again on the same number of processes, and return whether the weights have the same bits."""
    [(report, _)] = run(tool, result["processes"], [result["dropout"]], timeout)
    return bool(report["sha256"] == result["sha256"])


def shown_difference(result: dict[str, Any], reference: dict[str, Any]) -> str:
    if result is reference:
        return "-"
    return "same bits" if result["sha256"] == reference["sha256"] else f"{result['difference']:.1e}"


def table(results: list[dict[str, Any]]) -> str:
    header = [
        "tool",
        "processes",
        "SHA-256 of the weights",
        "difference from 1 process",
        "difference without dropout",
        "samples evaluated",
        "steps",
        "accuracy",
    ]
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["tool"], result["dropout"] > 0), []).append(result)
    rows = []
    for name in dict.fromkeys(result["tool"] for result in results):
        with_dropout, without = groups[name, True], groups[name, False]
        for result, plain in zip(with_dropout, without, strict=True):
            differences = [shown_difference(result, with_dropout[0]), shown_difference(plain, without[0])]
            counts = [str(result["samples"]), str(result["steps"]), f"{result['accuracy']:.2%}"]
            rows.append([name, str(result["processes"]), result["sha256"][:12], *differences, *counts])
    return markdown_table(header, rows)


def same_training(results: list[dict[str, Any]]) -> str:
    """Return a sentence on the tools with the same bits as DDP on one process without dropout."""
    first = {
        result["tool"]: result["sha256"] for result in results if result["processes"] == 1 and not result["dropout"]
    }
    equal = [name for name, digest in first.items() if digest == first["DDP"]]
    return f"Without dropout, these have the same bits on one process: {', '.join(equal)}."


def page(machine: dict[str, Any], results: list[dict[str, Any]], repeatable: dict[str, bool], processes: int) -> str:
    again = "; ".join(name for name, is_equal in repeatable.items() if is_equal)
    other = "; ".join(name for name, is_equal in repeatable.items() if not is_equal)
    imagenet = sorted({result["samples_imagenet"] for result in results if "samples_imagenet" in result})
    return f"""# One training on several numbers of processes

{machine_line(machine)}

A small convolutional net with dropout {DROPOUTS[0]} on the handwritten digits of scikit-learn: 1,436 training images,
361 held-out images, global batch 64, 2 epochs, SGD with momentum; gloo, one thread per process. A difference is the
largest absolute difference in a tensor of weights relative to the tensor's largest value; the table shows the maximum
over tensors. `without dropout` is a second series with dropout 0.

{table(results)}

Control: a second training with dropout in {processes} new processes.
Same bits as the first: {again or "none"}. Other bits: {other or "none"}.

- The other tools have a batch size per process: 64, 32, 21 and 16. On 3 processes, their global batch is 63; on 2 and
  4 processes, it is 64.
- Dropout explains most of the difference of the other tools: each process draws its masks from its random state, so
  the masks of a global batch depend on the number of processes. Such trainings are comparable statistically.
- The last global batch of an epoch has 28 samples. `DistributedSampler` adds samples only if the training images do not
  divide evenly (on 3 processes, 1 sample). Accelerate and Hugging Face Trainer fill the last batch of each process with
  further samples of the epoch. `drop_last` avoids this; the tool then makes 44 steps in place of 46.
- Evaluation of DDP uses `DistributedSampler`, as many scripts do. The scheme of PyTorch's ImageNet example (evaluate
  the remaining samples on each process) counted, on every number of processes: {", ".join(map(str, imagenet))}.
- Evaluation of Lightning Trainer is `trainer.validate` on all processes. For tests, Lightning's documentation
  recommends one device, which counts each sample once.
- {same_training(results)}
- Equality on different numbers of processes is no stated goal of the other tools. The table measures a property, not
  the quality of training.
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/peers.py --processes 2 --output /tmp/peers.json",
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N", help="1 is always included"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds per run (default: 600)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "peers.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    counts = sorted({1, *options.processes})
    machine = describe_machine()
    machine["versions"]["transformers"] = version("transformers")
    results, repeatable = [], {}
    for tool in TOOLS:
        measured = measure(tool, counts, options.timeout)
        results += measured
        repeatable[tool.name] = is_repeatable(tool, measured[-len(DROPOUTS)], options.timeout)
    settings = {"processes": counts, "dropouts": DROPOUTS}
    save(
        options.output,
        {"machine": machine, "settings": settings, "results": results, "repeatable": repeatable},
        page(machine, results, repeatable, counts[-1]),
    )
    print(f"\n{table(results)}\n\nwritten to {options.output} and {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
