"""`samestep bench`: comparison of the ways to run a recipe on this machine, or of numbers of loader processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from samestep.checkpoint.files import replacing
from samestep.cli.commands import PRELOAD
from samestep.cli.external_launcher import require_single_process
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
    print_json,
)
from samestep.cli.recipe_options import RecipeOptions, load_resolved, parse_strategy
from samestep.config import RunOptions
from samestep.config.key_suggestions import suggest
from samestep.errors import EXIT_DONE, EXIT_STOPPED, InputError
from samestep.loggers.logger import to_json
from samestep.recipes.recipe_files import recipe_data
from samestep.tools.bench import ACCUMULATE, DEVICES, WAYS, Plan
from samestep.tools.bench_workers import WORKERS
from samestep.tools.timing import describe_machine


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, DeviceOption, RecipeOptions):
    """Compare the ways to train a recipe on this machine, or numbers of loader processes.

    The ways are one device, nn.DataParallel and DDP on several devices, several microbatches per rank, bf16, compressed
    gradients, sync batch norm and additional strategies. All are trained, then timed in turn. Ways that cannot run here
    are listed with the reason.
    """

    example: ClassVar = "samestep bench digits --devices 1,2 --layout fsdp --epochs 1 --rounds 2"

    devices: tuple[int, ...] | None = option(
        "numbers of devices, one rank each (default 1,2,4; with --workers, 1)", "N,N,...", type=integers
    )
    layout: Sequence[str] = option(
        "additional strategy, such as fsdp or hsdp:shard=2 (docs/guides/strategies/index.md); can be repeated",
        "NAME[:AXIS=N,...]",
        default=(),
        action="append",
    )
    ways: tuple[str, ...] = option(
        f"ways next to one device and the layouts (default {','.join(WAYS)})", "NAME,...", default=WAYS, type=names
    )
    accumulate: tuple[int, ...] | None = option(
        "microbatches of a rank in a step, each a way with the same batch size (default "
        f"{','.join(map(str, ACCUMULATE))})",
        "K,K,...",
        type=integers,
    )
    epochs: int | None = option(
        "training epochs before the evaluation of each way (default: the recipe's; 0: no evaluation)", "E", type=count
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
    out: Path | None = option("folder for bench.json and bench.png (default runs/bench-...)", "DIR")
    no_picture: bool = option("write no bench.png", default=False)


def run(options: Options) -> int:
    """Compare and print."""
    require_single_process("bench")
    if options.recipe.endswith(".py"):
        raise InputError(
            f"samestep bench {options.recipe} is a script",
            expected="a recipe: samestep bench changes settings that a script sets itself",
            fix=f"samestep run --processes N {options.recipe}, for each number N",
            code="E_SCRIPT",
        )
    for name in options.ways:
        if name not in WAYS:
            fix = f"did you mean {suggest(name, WAYS) or WAYS[0]}?"
            raise InputError(f"--ways: unknown {name!r}", f"some of {', '.join(WAYS)}", fix, code="E_VALUE")
    if options.workers is not None and len(options.workers) > 1:
        return _bench_workers(options, options.workers)
    return _bench_ways(options)


def _bench_ways(options: Options) -> int:
    # Imported here: the other commands do not need these modules.
    from samestep.metrics.class_report import require_matplotlib
    from samestep.tools.bench import compare, contenders, draw, show

    recipe = load_resolved(options.recipe, options.overrides, options.note)
    strategies = [parse_strategy(text) for text in options.layout]
    if not options.no_picture:
        require_matplotlib("comparison")
    gpus = _gpus(options)
    ways = options.ways
    if options.accumulate is not None:
        ways = (*ways, "accumulate")  # the option selects its variants also without their name
    variants, absent = contenders(
        recipe,
        options.devices or DEVICES,
        strategies,
        len(gpus) or None,
        ways=ways,
        accumulate=options.accumulate or ACCUMULATE,
    )
    plan = _plan(options, recipe.epochs if options.epochs is None else options.epochs)
    stem = Path(options.recipe).stem
    with output_folder(options.out, f"bench-{stem}") as folder:
        machine = describe_machine(gpus)  # before the load of the comparison
        facts = {"recipe": recipe_data(recipe), "machine": machine}

        def save(results: dict[str, Any]) -> None:
            _write(folder, {**facts, **results})

        data = {**facts, **compare(variants, absent, plan, options.note, save)}
        if not options.no_picture:
            draw(data["ways"], f"{stem} on {machine['device']}", folder / "bench.png")
    if options.json:
        print_json({**data, "folder": str(folder)})
    else:
        show(data)
        print(f"written     {folder / 'bench.json'}{'' if options.no_picture else ', bench.png'}")
    return EXIT_DONE if data["complete"] else EXIT_STOPPED


def _bench_workers(options: Options, workers: tuple[int, ...]) -> int:
    from samestep.tools.bench_workers import compare_workers, show_workers

    if options.layout or options.accumulate or options.epochs or options.ways != WAYS:
        raise option_conflict("--workers with several numbers, and an option of the ways", "one of them")
    recipe = load_resolved(options.recipe, options.overrides, options.note)
    plan = _plan(options, epochs=0)
    with output_folder(options.out, f"bench-{Path(options.recipe).stem}") as folder:
        facts = {"recipe": recipe_data(recipe), "machine": describe_machine(_gpus(options))}
        devices = options.devices or (1,)
        results = compare_workers(recipe, workers, devices, plan, options.note)
        data = {**facts, **results}
        _write(folder, data)
    if options.json:
        print_json({**data, "folder": str(folder)})
    else:
        show_workers(data)
        print(f"written     {folder / 'bench.json'}")
    return EXIT_DONE


def _gpus(options: Options) -> list[str]:
    return [] if options.device == "cpu" else gpu_names()


def _plan(options: Options, epochs: int) -> Plan:
    single = options.workers[0] if options.workers else None
    run_options = RunOptions(device=options.device, workers=single, quiet=options.json)
    return Plan(rounds=options.rounds, steps=options.steps, epochs=epochs, options=run_options, preload=PRELOAD)


def _write(folder: Path, data: dict[str, Any]) -> None:
    with replacing(folder / "bench.json") as temporary:
        temporary.write_text(to_json(data), encoding="utf-8")
