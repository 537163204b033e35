"""Operations of torch in a step beyond those of a plain loop, on one process: what a GPU would have to launch.

Counted on a CPU, with the choices that recipes and torch make on a GPU: fused or `foreach` optimizers. An
operation is a call of torch that computes: views and allocations are none, and one on a list of tensors is one.
Batch norm of several microbatches has more of them on a CPU than on a GPU, which has kernels for its parts.
Operations of the profiler are counted, as `samestep.parallel` computes calls whole under a dispatch mode.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, machine_line, markdown_table, save
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import ProfilerActivity, profile

import samestep
from samestep.checkpoint.contents import SavedParameters
from samestep.config import Reduction
from samestep.distributed.world import World
from samestep.parallelize import world_of_process
from samestep.recipes.bad_samples import RecipeBatch
from samestep.recipes.loss import RecipeLoss
from samestep.recipes.recipe_files import load_recipe
from samestep.recipes.training_step import Driver
from samestep.session import start
from samestep.view.view import View
from samestep.zoo.losses import cross_entropy as recipe_cross_entropy

OUTPUT = Path(__file__).parent / "results" / "gpu_operations.json"
ROWS = 8
CLASSES = 1000
PIXELS = {"ResNet-50": 64, "ViT-B/16": 32}
PLAIN = "plain loop"
_FREE = (
    *("alias", "as_strided", "chunk", "contiguous", "detach", "detach_", "diagonal", "empty", "empty_like"),
    *("empty_strided", "expand", "expand_as", "flatten", "is_pinned", "lift_fresh", "narrow", "new_empty"),
    *("new_empty_strided", "permute", "promote_types", "_reshape_alias", "reshape", "resize_", "resolve_conj"),
    *("resolve_neg", "result_type", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t", "to"),
    *("transpose", "unbind", "unflatten", "unfold", "_unsafe_view", "unsqueeze", "view", "view_as"),
)
_NOT_COUNTED = frozenset(f"aten::{name}" for name in _FREE)
Step = Callable[[], Any]


def count(step: Step) -> Counter[str]:
    """Return the operations of a step by name, after some steps that warm up."""
    for _ in range(3):  # the first calls of a kind are computed whole
        step()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    counts: Counter[str] = Counter()
    _add((event for event in profiler.events() or () if event.cpu_parent is None), counts)
    return counts


def _add(events: Iterable[FunctionEvent], counts: Counter[str]) -> bool:
    """Count the innermost operations of events; return whether there are any."""
    found = False
    for event in events:
        is_list = event.name.startswith(("aten::_foreach_", "aten::_fused_"))
        if not is_list and _add(event.cpu_children, counts):
            found = True
        elif event.name.startswith("aten::") and event.name not in _NOT_COUNTED:
            counts[event.name.removeprefix("aten::")] += 1
            found = True
    return found


def build(name: str) -> nn.Module:
    """Return a model."""
    from torchvision.models import resnet50, vit_b_16

    torch.manual_seed(0)
    return resnet50() if name == "ResNet-50" else vit_b_16(image_size=PIXELS[name])


def batch_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return small images and classes."""
    return torch.randn(ROWS, 3, PIXELS[name], PIXELS[name]), torch.randint(CLASSES, (ROWS,))


def loop(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], *, is_usual: bool = False) -> Step:
    """Return the step of a loop; with `is_usual` it clips the gradient and prints its loss, as most loops do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)  # torch's choice on GPUs
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        if is_usual:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        if is_usual:
            loss.item()

    return step


def recipe(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], world: World, *overrides: str) -> Step:
    """Return the step of a recipe, with the optimizer that it has on GPUs."""
    settings = load_recipe("digits", overrides).with_microbatches()  # its data and model are not built
    model = samestep.parallel(model, reduction=settings.step.reduction, microbatches=settings.microbatch_count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    driver = Driver(
        model,
        optimizer,
        RecipeLoss(recipe_cross_entropy),
        world=world,
        recipe=settings,
        scheduler=LambdaLR(optimizer, lambda step: 1.0),
        parameters=SavedParameters(model),
    )
    whole = RecipeBatch(batch, torch.arange(len(batch[1])), [])
    return lambda: driver.step(whole)


def measure(name: str, microbatches: Sequence[int]) -> dict[str, Counter[str]]:
    """Count the operations of all contenders; `exact` with these numbers of microbatches."""
    batch = batch_of(name)
    counts = {}

    def add(contender: str, reduction: Reduction, make: Callable[[nn.Module, World], Step]) -> None:
        with start(device="cpu", threads=1, reduction=reduction) as world, world_of_process(world, reduction):
            counts[contender] = count(make(build(name), world))

    def parallel(reduction: Reduction, slices: int) -> Callable[[nn.Module, World], Step]:
        return lambda model, world: loop(
            samestep.parallel(model, reduction=reduction, microbatches=slices, strict=True), batch
        )

    add(PLAIN, "fast", lambda model, world: loop(model, batch))
    add("plain loop with clipping and item", "fast", lambda model, world: loop(model, batch, is_usual=True))
    add("samestep.parallel, fast", "fast", parallel("fast", ROWS))
    for slices in microbatches:
        add(f"samestep.parallel, exact, microbatches={slices}", "exact", parallel("exact", slices))
    add("recipe, fast", "fast", lambda model, world: recipe(model, batch, world))
    add("recipe, fast, clip_norm", "fast", lambda model, world: recipe(model, batch, world, "step.clip_norm=1"))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PIXELS, default=list(PIXELS), metavar="MODEL")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 8], metavar="N", help="of `exact`")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"JSON file (default: {OUTPUT})")
    options = parser.parse_args()
    View.divides_small_calls = True
    machine = describe_machine()
    lines = []
    for name in options.models:
        counts = measure(name, options.microbatches)
        plain = counts[PLAIN]
        for contender, counted in counts.items():
            beyond = {key: counted[key] - plain[key] for key in sorted(counted | plain) if counted[key] != plain[key]}
            total = counted.total()
            line = {"model": name, "step": contender, "operations": total, "beyond": total - plain.total()}
            print(json.dumps(line), flush=True)
            lines.append(line | {"by_name": beyond})
    rows = [[line["model"], line["step"], str(line["operations"]), str(line["beyond"])] for line in lines]
    table = markdown_table(["model", "step", "operations", "beyond the plain loop"], rows)
    heading = f"# Operations of a step on one process\n\n{machine_line(machine)}\nBatch of {ROWS} samples, fp32, SGD.\n"
    save(options.output, {"machine": machine, "rows": ROWS, "lines": lines}, f"{heading}\n{table}\n")


if __name__ == "__main__":
    main()
