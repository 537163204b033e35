"""Steps of unchanged scripts on two processes, compared with the same scripts with the line `samestep.parallel(model)`.

    python benchmarks/unchanged_speed.py --result benchmarks/results/unchanged_speed.json

Both run in turns. A step is the time from one step of an optimizer to the next: median of a run, without the first
steps. Small calls are divided in both, as otherwise most of these scripts would be computed whole.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from machine import describe_machine, machine_line, markdown_table, save

from samestep.launcher.launch import LaunchConfig, run_workers
from samestep.launcher.pickling import ByName

SCRIPTS = Path(__file__).parents[1] / "tests" / "scripts"
NAMES = (
    "mnist_convnet",
    "unet_dice",
    "variational_autoencoder",
    "masked_autoencoder",
    "vit_layer_decay_ema",
    "transformer_classifier",
)
FIRST = 6  # steps with trials
_MODEL = re.compile(r"^( *)model = .*\.to\(.*\)$", re.MULTILINE)
_LINE = r"\g<0>\n\1import samestep\n\1model = samestep.parallel(model)"


def run(script: Path, folder: Path, *, is_unchanged: bool) -> None:
    """Run a script in this rank, and write the times of its steps."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from samestep.launcher.process_state import rank_and_size
    from samestep.launcher.worker import run_script
    from samestep.script.unchanged import unchanged
    from samestep.view.view import View

    rank, _ = rank_and_size()
    os.chdir(folder)
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    View.divides_small_calls = True
    times: list[float] = []
    hook = register_optimizer_step_post_hook(lambda *_: times.append(time.perf_counter()))
    surroundings: Any = nullcontext
    if is_unchanged:
        surroundings = unchanged
    try:
        run_script(script, (), own_group=False, surroundings=surroundings)
    finally:
        hook.remove()
        (folder / f"times{rank}.json").write_text(json.dumps(times), encoding="utf-8")


def seconds_of_step(source: str, folder: Path, *, is_unchanged: bool) -> float:
    """Return the median time of a step on two processes."""
    folder.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(source, encoding="utf-8")
    function = partial(ByName("unchanged_speed", "run"), script, folder, is_unchanged=is_unchanged)
    run_workers(function, processes=2, launch_config=LaunchConfig(120, log_dir=folder / "logs"))
    times = json.loads((folder / "times0.json").read_text(encoding="utf-8"))
    return median(after - before for before, after in zip(times[FIRST:], times[FIRST + 1 :], strict=False))


def measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the times of a script in both ways, in turns."""
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    with_line, count = _MODEL.subn(_LINE, source)
    assert count == 1, name
    pairs = []
    for number in range(rounds):
        unchanged_seconds = seconds_of_step(source, folder / f"{number}-unchanged", is_unchanged=True)
        line_seconds = seconds_of_step(with_line, folder / f"{number}-line", is_unchanged=False)
        pairs.append((unchanged_seconds, line_seconds))
    ratios = sorted(first / second for first, second in pairs)
    result = {"script": name, "pairs": pairs, "ratio": median(ratios), "least": ratios[0], "most": ratios[-1]}
    print(f"{name:26} {result['ratio']:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})", flush=True)
    return result


def page(results: Sequence[dict[str, Any]], machine: dict[str, Any]) -> str:
    """Return the Markdown page of the results."""
    rows = []
    for one in results:
        milliseconds = [f"{1000 * median(times):.1f}" for times in zip(*one["pairs"], strict=True)]
        rows.append([one["script"], *milliseconds, f"{one['ratio']:.3f}", f"{one['least']:.3f} to {one['most']:.3f}"])
    table = markdown_table(["script", "unchanged (ms)", "one line (ms)", "ratio", "range"], rows)
    return (
        "# Steps of unchanged scripts on two processes\n\n"
        "Written by `python benchmarks/unchanged_speed.py`: compared with the same script with the line\n"
        "`samestep.parallel(model)`, in turns; median of a run, and of the ratios.\n\n"
        f"{machine_line(machine)}\n\n{table}\n"
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=NAMES, help="names of scripts")
    parser.add_argument("--rounds", type=int, default=5, help="runs in each way")
    parser.add_argument("--result", type=Path, help="JSON file of the results, with a page next to it")
    options = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(name, options.rounds, Path(folder) / name) for name in options.names]
    if options.result is not None:
        save(options.result, {"machine": machine, "results": results}, page(results, machine))


if __name__ == "__main__":
    main()
