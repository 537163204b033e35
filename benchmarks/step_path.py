"""Files and lines of Samestep that one step of a plain loop runs through, with `samestep.parallel` on two processes.

What a reader has to know to follow a step. The model has no batch norm and no random draws; the counted step comes
after those that decide how calls are divided. Lines are those of the functions that ran, counted once.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import samestep

PACKAGE = Path(samestep.__file__).parent
STEPS = 6  # until the counted one


def counted_step(reduction: str) -> dict[str, int] | None:
    """Train some steps; return the lines of functions by file, of the last step on rank 0."""
    world = samestep.init(device="cpu", reduction=reduction)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    options: dict[str, Any] = {"reduction": reduction, "microbatches": world.size}
    samestep.parallel(model, strict=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(32, 64)
    targets = torch.randint(10, (32,))
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    for number in range(STEPS + 1):
        if number == STEPS:
            sys.setprofile(note)
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sys.setprofile(None)
    return lines_by_file(codes) if world.is_main else None


def lines_by_file(codes: set[CodeType]) -> dict[str, int]:
    """Return the lines of the outermost functions of the package among some code objects."""
    lines: dict[str, set[int]] = defaultdict(set)
    for code in codes:
        path = Path(code.co_filename)
        if not path.is_relative_to(PACKAGE) or code.co_name == "<module>":
            continue
        source, first = inspect.getsourcelines(code)
        lines[str(path.relative_to(PACKAGE))] |= set(range(first, first + len(source)))
    return {name: len(numbers) for name, numbers in sorted(lines.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduction", choices=("fast", "exact"), default="exact")
    options = parser.parse_args()
    lines = samestep.launch(counted_step, options.reduction, processes=2)
    print(json.dumps({"files": len(lines), "lines": sum(lines.values()), "by_file": lines}, indent=2))


if __name__ == "__main__":
    main()
