"""`samestep bench`: comparison of the ways to run a recipe on this machine, or of numbers of loader processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from samestep.checkpoint.files import replacing
from samestep.cli.commands import PRELOAD
from samestep.cli.launch_options import gpu_names
from samestep.cli.options import (
    DeviceOption,
    JsonOption,
    count,
    counts,
    integers,
    names,
    option,
    option_conflict,
    output_folder,
)
from samestep.cli.recipe_options import RecipeOptions, load_resolved, parse_strategy
from samestep.config import RunOptions
from samestep.errors import EXIT_DONE, EXIT_STOPPED, InputError
from samestep.loggers.logger import to_json
from samestep.recipes.recipe_files import recipe_data
from samestep.tools.bench import ACCUMULATE, DEVICES, WAYS, WORKERS, Plan
from samestep.tools.launch import describe_machine


def _ways(text: str) -> tuple[str, ...]:
    for name in names(text):
        if name not in WAYS:
            raise InputError(
                f"--ways {name}", f"some of {', '.join(WAYS)}", f"--ways {WAYS[0]}", code="E_VALUE"
            )
    return names(text)


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, DeviceOption, RecipeOptions):
    """Compare the ways to train a recipe on this machine, or numbers of loader processes.

    The ways are one device, DDP and nn.DataParallel on several devices, batches in parts, bf16,
    compressed gradients, the exact reduction, batch norm of each rank, and additional strategies.
    All are trained, then timed in turn. Ways that cannot run here are listed with the reason.
    """

    example: ClassVar = "samestep bench digits --devices 1,2 --layout fsdp --epochs 1 --rounds 2"

    devices: tuple[int, ...] | None = option(
        "numbers of devices, one rank each (default 1,2,4; with --workers, 1)",
        "N,N,...",
        type=integers,
    )
    layout: Sequence[str] = option(
        "additional strategy, such as fsdp or hsdp:shard=2 (docs/guides/strategies/index.md); can be repeated",
        "NAME[:AXIS=N,...]",
        default=(),
        action="append",
    )
    ways: tuple[str, ...] = option(
        f"ways next to one device and the layouts (default {','.join(WAYS)})",
        "NAME,...",
        default=WAYS,
        type=_ways,
    )
    accumulate: tuple[int, ...] | None = option(
        f"parts of a batch, each a way with the same batch size (default {','.join(map(str, ACCUMULATE))})",
        "K,K,...",
        type=integers,
    )
    epochs: int | None = option(
        "training epochs before the evaluation of each way (default: the recipe's; 0: no evaluation)",
        "E",
        type=count,
    )
    workers: tuple[int, ...] | None = option(
        "numbers of loader processes per rank to compare, with the recipe as it is (without numbers: "
        f"{','.join(map(str, WORKERS))}); a single number: for all ways",
        "N,N,...",
        nargs="?",
        const=WORKERS,
        type=counts,
    )
    rounds: int = option("trials of each way, interleaved (default 5)", "N", default=5)
    steps: int = option("steps per trial, after three warm-up steps (default 20)", "N", default=20)
    out: Path | None = option("folder for bench.json (default runs/bench-...)", "DIR")


def run(options: Options) -> int:
    """Compare and print."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.bench import compare, compare_workers, contenders, show, show_workers

    recipe = load_resolved(options.recipe, options.overrides, options.note)
    gpus = [] if options.device == "cpu" else gpu_names()
    workers = options.workers or ()
    compares_workers = len(workers) > 1
    if compares_workers and (
        options.layout or options.accumulate or options.epochs or options.ways != WAYS
    ):
        raise option_conflict("--workers with several numbers, and an option of the ways")
    strategies = [parse_strategy(text) for text in options.layout]
    # `--accumulate` selects its variants also without their name.
    ways = options.ways if options.accumulate is None else (*options.ways, "accumulate")
    variants, absent = contenders(
        recipe,
        options.devices or DEVICES,
        strategies,
        len(gpus) or None,
        ways=ways,
        accumulate=options.accumulate or ACCUMULATE,
    )
    run_options = RunOptions(
        device=options.device, workers=next(iter(workers), None), quiet=options.json
    )
    epochs = recipe.epochs if options.epochs is None else options.epochs
    plan = Plan(
        rounds=options.rounds,
        steps=options.steps,
        epochs=epochs,
        options=run_options,
        preload=PRELOAD,
    )
    with output_folder(options.out, f"bench-{Path(options.recipe).stem}") as folder:
        facts = {"recipe": recipe_data(recipe), "machine": describe_machine(gpus)}

        def save(results: dict[str, Any]) -> None:
            with replacing(folder / "bench.json") as temporary:
                temporary.write_text(to_json({**facts, **results}), encoding="utf-8")

        if compares_workers:
            print_table = show_workers
            results = compare_workers(recipe, workers, options.devices or (1,), plan, options.note)
            save(results)
        else:
            print_table = show
            results = compare(variants, absent, plan, options.note, save)
    data = {**facts, **results}
    if not options.json:
        print_table(data)
    options.result({**data, "folder": str(folder)}, f"written     {folder / 'bench.json'}")
    if data.get("complete", True):
        return EXIT_DONE
    return EXIT_STOPPED
