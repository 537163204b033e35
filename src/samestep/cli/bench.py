"""`samestep bench`: comparison of the ways to run a recipe on this machine, or of numbers of loader processes."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import replacing
from samestep.cli.commands import PRELOAD
from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import gpu_names
from samestep.cli.options import (
    add_number,
    add_options,
    add_recipe_argument,
    option_conflict,
    output_folder,
    parse_integers,
    print_json,
    progress,
    refuse_script,
)
from samestep.cli.recipe_options import load_with_microbatches, parse_strategy
from samestep.config import RunOptions
from samestep.errors import EXIT_DONE, EXIT_STOPPED, InputError
from samestep.loggers.logger import to_json
from samestep.recipes.recipe_files import recipe_data
from samestep.tools.bench import ACCUMULATE, DEVICES, WAYS, Plan
from samestep.tools.bench_workers import WORKERS
from samestep.tools.timing import describe_machine


def add_bench(add_parser: Any) -> None:
    """Add `samestep bench`."""
    parser = add_parser(
        description="Train a recipe on one device, with nn.DataParallel and with DDP on several devices, with several "
        "microbatches per rank, in bf16, with compressed gradients, with sync batch norm and with additional "
        "strategies; then time all of them in turn. Variants that cannot run here are listed with the reason. With "
        "--workers, compare numbers of loader processes instead.",
        epilog="examples: samestep bench digits --devices 1,2 --layout fsdp --epochs 1 --rounds 2; "
        "samestep bench digits --workers 0,1,2",
    )
    add_recipe_argument(parser)
    group = parser.add_argument_group("variants")
    group.add_argument(
        "--devices",
        type=partial(parse_integers, "--devices"),
        metavar="N,N,...",
        help="numbers of devices, one rank each (default 1,2,4; with --workers, 1)",
    )
    text = "additional strategy, such as fsdp or hsdp:shard=2 (docs/guides/strategies/index.md); can be repeated"
    group.add_argument("--layout", action="append", default=[], metavar="NAME[:AXIS=N,...]", help=text)
    group.add_argument(
        "--ways",
        type=_parse_ways,
        metavar="NAME,...",
        help=f"variants next to one device and the layouts (default {','.join(WAYS)})",
    )
    group.add_argument(
        "--accumulate",
        type=partial(parse_integers, "--accumulate"),
        metavar="K,K,...",
        help="microbatches of a rank in a step, each a variant with the same batch size (default "
        f"{','.join(map(str, ACCUMULATE))})",
    )
    text = "training epochs before the evaluation of each variant (default: the recipe's; 0: no evaluation)"
    add_number(group, "--epochs", zero=True, metavar="E", help=text)
    group.add_argument(
        "--workers",
        nargs="?",
        const=",".join(map(str, WORKERS)),
        type=partial(parse_integers, "--workers", minimum=0),
        metavar="N,N,...",
        help="numbers of loader processes per rank to compare, with the recipe as it is, in place of the variants "
        "(without numbers: %(const)s); a single number: for all variants",
    )
    group = parser.add_argument_group("timing")
    add_number(group, "--rounds", default=5, help="trials of each variant, interleaved (default 5)")
    add_number(group, "--steps", default=20, help="steps per trial, after three warm-up steps (default 20)")
    group = parser.add_argument_group("machine")
    add_options(group, "--device")
    text = "folder for bench.json and bench.png (default runs/bench-...)"
    group.add_argument("--out", type=Path, metavar="DIR", help=text)
    group.add_argument("--no-picture", action="store_true", help="write no bench.png")
    add_options(parser, "--json")
    parser.set_defaults(run=_bench)


def _parse_ways(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in WAYS:
            close = get_close_matches(name.replace("-", "_").replace(" ", "_"), WAYS, n=1)
            fix = f"did you mean {close[0]}?" if close else f"--ways {WAYS[0]}"
            raise InputError(f"--ways {text}: unknown {name!r}", f"some of {', '.join(WAYS)}", fix, code="E_VALUE")
    return names


def _bench(arguments: argparse.Namespace) -> int:
    """Compare and print."""
    require_single_process("bench")
    refuse_script(
        arguments,
        "bench",
        f"samestep run --processes N {arguments.recipe}, for each number N; the script can measure its own steps",
    )
    if arguments.workers is not None and len(arguments.workers) > 1:
        return _bench_workers(arguments)
    return _bench_ways(arguments)


def _bench_ways(arguments: argparse.Namespace) -> int:
    # Imported here: the other commands do not need these modules.
    from samestep.metrics.class_report import require_matplotlib
    from samestep.tools.bench import compare, contenders, draw, show

    recipe = load_with_microbatches(arguments, arguments.overrides)
    strategies = [parse_strategy(text) for text in arguments.layout]
    if not arguments.no_picture:
        require_matplotlib("comparison")
    gpus = _gpus(arguments)
    ways = arguments.ways or WAYS
    if arguments.accumulate is not None:
        ways = (*ways, "accumulate")  # the option selects its variants also without their name
    variants, absent = contenders(
        recipe,
        arguments.devices or DEVICES,
        strategies,
        len(gpus) or None,
        ways=ways,
        accumulate=arguments.accumulate or ACCUMULATE,
    )
    plan = _plan(arguments, recipe.epochs if arguments.epochs is None else arguments.epochs)
    stem = Path(arguments.recipe).stem
    with output_folder(arguments.out, f"bench-{stem}") as folder:
        machine = describe_machine(gpus)  # before the load of the comparison
        facts = {"recipe": recipe_data(recipe), "machine": machine}

        def save(results: dict[str, Any]) -> None:
            _write(folder, {**facts, **results})

        data = {**facts, **compare(variants, absent, plan, progress(arguments), save)}
        if not arguments.no_picture:
            draw(data["ways"], f"{stem} on {machine['device']}", folder / "bench.png")
    if arguments.json:
        print_json({**data, "folder": str(folder)})
    else:
        show(data)
        print(f"written     {folder / 'bench.json'}{'' if arguments.no_picture else ', bench.png'}")
    return EXIT_DONE if data["complete"] else EXIT_STOPPED


def _bench_workers(arguments: argparse.Namespace) -> int:
    from samestep.tools.bench_workers import compare_workers, show_workers

    for option in ("ways", "layout", "accumulate", "epochs"):
        if getattr(arguments, option):
            raise option_conflict(f"--workers with several numbers and --{option}", "one of them")
    recipe = load_with_microbatches(arguments, arguments.overrides)
    plan = _plan(arguments, epochs=0)
    with output_folder(arguments.out, f"bench-{Path(arguments.recipe).stem}") as folder:
        facts = {"recipe": recipe_data(recipe), "machine": describe_machine(_gpus(arguments))}
        devices = arguments.devices or (1,)
        results = compare_workers(recipe, arguments.workers, devices, plan, progress(arguments))
        data = {**facts, **results}
        _write(folder, data)
    if arguments.json:
        print_json({**data, "folder": str(folder)})
    else:
        show_workers(data)
        print(f"written     {folder / 'bench.json'}")
    return EXIT_DONE


def _gpus(arguments: argparse.Namespace) -> list[str]:
    return [] if arguments.device == "cpu" else gpu_names()


def _plan(arguments: argparse.Namespace, epochs: int) -> Plan:
    single = arguments.workers[0] if arguments.workers else None
    options = RunOptions(device=arguments.device, workers=single, quiet=arguments.json)
    return Plan(rounds=arguments.rounds, steps=arguments.steps, epochs=epochs, options=options, preload=PRELOAD)


def _write(folder: Path, data: dict[str, Any]) -> None:
    with replacing(folder / "bench.json") as temporary:
        temporary.write_text(to_json(data), encoding="utf-8")
