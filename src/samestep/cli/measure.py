"""`samestep bench`, `profile` and `tune`: measurements of a recipe on this machine."""

from __future__ import annotations

import argparse
import shlex
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.checkpoint.files import replacing
from samestep.cli.commands import PRELOAD
from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import LaunchOptions, gpu_names
from samestep.cli.options import (
    add_machine_options,
    add_number,
    add_options,
    add_recipe_argument,
    add_subject_argument,
    options_of,
    output_folder,
    parse_integers,
    print_json,
    progress,
    refuse_script,
    run_options,
    script_of,
)
from samestep.cli.recipe_options import (
    add_strategy_options,
    all_overrides,
    load_with_microbatches,
    parse_strategy,
    with_batch_size,
)
from samestep.config import Recipe, RunOptions
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, EXIT_STOPPED, InputError
from samestep.loggers.logger import to_json
from samestep.recipes.recipe_files import recipe_data
from samestep.tools.bench import ACCUMULATE, WAYS
from samestep.tools.tune.settings import PREFETCH, STEP_OPTIONS, WORKERS, TuneTarget, grid, machine_key, write_tuning
from samestep.units import parse_bytes, plural

if TYPE_CHECKING:
    from samestep.tools.tune.tune import TuneConfig

_ROUNDS = 5  # of `samestep tune`


def add_bench(add_parser: Any) -> None:
    """Add `samestep bench`."""
    parser = add_parser(
        description="Train a recipe on one device, with nn.DataParallel and with DDP on several devices, with several "
        "microbatches per rank, in bf16, with compressed gradients, with sync batch norm and with additional "
        "strategies; then time all of them in turn. Variants that cannot run here are listed with the reason.",
        epilog="example: samestep bench digits --devices 1,2 --layout fsdp --epochs 1 --rounds 2",
    )
    add_recipe_argument(parser)
    group = parser.add_argument_group("variants")
    group.add_argument(
        "--devices",
        type=partial(parse_integers, "--devices"),
        default="1,2,4",
        metavar="N,N,...",
        help="numbers of devices, one rank each (default 1,2,4)",
    )
    text = "additional strategy, such as fsdp or hsdp:shard=2 (docs/guides/strategies/index.md); can be repeated"
    group.add_argument("--layout", action="append", default=[], metavar="NAME[:AXIS=N,...]", help=text)
    group.add_argument(
        "--ways",
        type=_parse_ways,
        default=",".join(WAYS),
        metavar="NAME,...",
        help="variants next to one device and the layouts (default %(default)s)",
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
    group = parser.add_argument_group("timing")
    add_number(group, "--rounds", default=5, help="trials of each variant, interleaved (default 5)")
    add_number(group, "--steps", default=20, help="steps per trial, after three warm-up steps (default 20)")
    group = parser.add_argument_group("machine")
    add_options(group, "--device", "--workers")
    text = "folder for bench.json and bench.png (default runs/bench-...)"
    group.add_argument("--out", type=Path, metavar="DIR", help=text)
    group.add_argument("--no-picture", action="store_true", help="write no bench.png")
    add_options(parser, "--json")
    parser.set_defaults(run=_bench)


def add_profile(add_parser: Any) -> None:
    """Add `samestep profile`."""
    parser = add_parser(
        description="Train some steps of a recipe or a script and measure their phases: data loading, forward, "
        "backward, communication, optimizer, checkpoints; the slowest rank; and the changes with the largest possible "
        "savings. Writes traces for Perfetto and TensorBoard.",
        epilog="example: samestep profile digits --processes 2 --active 20 --ranks 0; for a script: "
        "samestep profile train.py --processes 2 -- --epochs 1",
    )
    add_subject_argument(parser)
    add_options(parser, "--per-device-batch-size", "--accumulate")
    add_machine_options(parser)
    add_strategy_options(parser)
    group = parser.add_argument_group("measurement")
    for name, default, text in (
        ("--wait", 2, "unmeasured steps at the start (default 2)"),
        ("--warmup", 2, "warm-up steps before the measured steps, and before the traced steps (default 2)"),
        ("--active", 20, "measured steps (default 20)"),
        ("--traced", 3, "following steps with torch's profiler (default 3; 0: none)"),
    ):
        add_number(group, name, zero=name != "--active", default=default, metavar="N", help=text)
    group.add_argument("--ranks", default="all", metavar="N,N,...", help="traced ranks (default all)")
    text = "steps between checkpoints (default: no checkpoints)"
    group.add_argument("--checkpoint-every", type=int, metavar="STEPS", help=text)
    group = parser.add_argument_group("output")
    text = "for profile.json, profile.png and traces (default runs/profile-...)"
    group.add_argument("--out", type=Path, metavar="DIR", help=text)
    group.add_argument("--no-picture", action="store_true", help="write no profile.png")
    add_options(parser, "--json")
    parser.set_defaults(run=_profile)


def add_tune(add_parser: Any) -> None:
    """Add `samestep tune`."""
    parser = add_parser(
        description="Find by short trials the number of loader processes and the prefetch of a recipe on this machine, "
        "check that microbatches fit into memory, and measure the effect of threads, channels-last and compilation. "
        "Settings that change no result are saved, and train and resume use them; the others are only reported.",
        epilog="example: samestep tune digits --processes 2 --workers 0,1,2 --try threads",
    )
    add_recipe_argument(parser)
    group = parser.add_argument_group("machine")
    text = "number of ranks, or auto: one per GPU, or one per core without GPUs"
    group.add_argument("--processes", metavar="N", help=text)
    add_options(group, "--devices", "--share-gpu", "--device")
    memory = partial(parse_bytes, "--memory")
    group.add_argument("--memory", type=memory, metavar="SIZE", help="memory limit of a rank, such as 2GiB")
    add_strategy_options(parser)
    group = parser.add_argument_group("trials")
    for name, values, minimum, text in (
        ("--workers", WORKERS, 0, "loader processes"),
        ("--prefetch", PREFETCH, 1, "microbatches ahead"),
    ):
        parse, default = partial(parse_integers, name, minimum=minimum), ",".join(map(str, values))
        group.add_argument(name, type=parse, default=default, metavar="N,N,...", help=f"{text} (default %(default)s)")
    text = "options of a step to measure, or none (default %(default)s; compile alone takes half a minute)"
    group.add_argument("--try", dest="rules", default=",".join(STEP_OPTIONS), metavar="RULE,...", help=text)
    text = "approximate time of a trial (default %(default)s)"
    group.add_argument("--seconds", type=float, default=0.5, metavar="S", help=text)
    group = parser.add_argument_group("output")
    add_options(group, "--runs")
    group.add_argument("--no-picture", action="store_true", help="write no tune.png")
    add_options(parser, "--json")
    parser.set_defaults(run=_tune)


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
    # Imported here: the other commands do not need these modules.
    from samestep.metrics.class_report import require_matplotlib
    from samestep.tools.bench import Plan, compare, contenders, draw, show
    from samestep.tools.timing import describe_machine

    require_single_process("bench")
    refuse_script(
        arguments,
        "bench",
        f"samestep run --processes N {arguments.recipe}, for each number N; the script can measure its own steps",
    )
    recipe = load_with_microbatches(arguments, arguments.overrides)
    strategies = [parse_strategy(text) for text in arguments.layout]
    if not arguments.no_picture:
        require_matplotlib("comparison")
    gpus = [] if arguments.device == "cpu" else gpu_names()
    # `--accumulate` selects its variants also without their name.
    ways = arguments.ways if arguments.accumulate is None else (*arguments.ways, "accumulate")
    accumulate = arguments.accumulate or ACCUMULATE
    variants, absent = contenders(
        recipe, arguments.devices, strategies, len(gpus) or None, ways=ways, accumulate=accumulate
    )
    epochs = recipe.epochs if arguments.epochs is None else arguments.epochs
    plan = options_of(Plan, arguments, epochs=epochs, options=run_options(arguments), preload=PRELOAD)
    stem = Path(arguments.recipe).stem
    with output_folder(arguments.out, f"bench-{stem}") as folder:
        machine = describe_machine(gpus)  # before the load of the comparison
        facts = {"recipe": recipe_data(recipe), "machine": machine}

        def save(results: dict[str, Any]) -> None:
            with replacing(folder / "bench.json") as temporary:
                temporary.write_text(to_json({**facts, **results}), encoding="utf-8")

        data = {**facts, **compare(variants, absent, plan, progress(arguments), save)}
        if not arguments.no_picture:
            draw(data["ways"], f"{stem} on {machine['device']}", folder / "bench.png")
    if arguments.json:
        print_json({**data, "folder": str(folder)})
    else:
        show(data)
        print(f"written     {folder / 'bench.json'}{'' if arguments.no_picture else ', bench.png'}")
    return EXIT_DONE if data["complete"] else EXIT_STOPPED


def _profile(arguments: argparse.Namespace) -> int:
    """Train, measure and print."""
    # Imported here: the other commands do not need these modules.
    from samestep.metrics.class_report import require_matplotlib
    from samestep.tools.profile.profile import Plan, Script, draw, move_to_run, parse_ranks, profile, show
    from samestep.tools.timing import describe_machine

    require_single_process("profile")
    launch = LaunchOptions.parse(arguments)
    script = script_of(arguments)
    if script is not None:
        subject: Recipe | Script = Script(script, tuple(arguments.script_arguments))
        _, processes = launch.process_range()
    else:
        size, accumulate = arguments.per_device_batch_size, arguments.accumulate
        overrides = with_batch_size(all_overrides(arguments), size, launch.processes, accumulate)
        subject = load_with_microbatches(arguments, overrides)
        _, processes = launch.process_range(subject)
    ranks, options = parse_ranks(arguments.ranks, processes), run_options(arguments)
    if not arguments.no_picture:
        require_matplotlib("profile")
    stem = Path(arguments.recipe).stem

    with output_folder(arguments.out, f"profile-{stem}") as folder:
        plan = options_of(Plan, arguments, ranks=ranks, folder=folder, options=options)
        progress(arguments)(f"training {plan.steps} steps of {stem} on {plural(processes, 'rank')}")
        machine = describe_machine([] if arguments.device == "cpu" else gpu_names())
        result = profile(stem, subject, plan, processes, machine, PRELOAD, launch.environment or {})
        (folder / "profile.json").write_text(to_json(result.to_dict()), encoding="utf-8")
        if not arguments.no_picture:
            draw(result, folder / "profile.png")
        result = move_to_run(result, is_chosen=arguments.out is not None)
    if arguments.json:
        print_json({**result.to_dict(), "folder": str(result.plan.folder)})
    else:
        show(result, is_drawn=not arguments.no_picture)
    return EXIT_DONE


def _tune(arguments: argparse.Namespace) -> int:
    """Tune and print; return 3 without output files if the microbatches do not fit into memory."""
    # Imported here: the other commands do not need these modules.
    from samestep.metrics.class_report import require_matplotlib
    from samestep.tools.timing import describe_machine
    from samestep.tools.tune.tune import draw, show, tune

    require_single_process("tune")
    advice = "try samestep.loader(num_workers=N, prefetch_factor=K) in the script, or tune a recipe with the same data"
    refuse_script(arguments, "tune", advice)
    recipe = load_with_microbatches(arguments, all_overrides(arguments))
    launch = LaunchOptions.parse(arguments)
    config = _tune_config(arguments, launch)
    if ":" in launch.processes:
        raise InputError(
            f"--processes {launch.processes}",
            expected="a positive number, or auto",
            fix="tune for each number separately",
            code="E_PROCESSES",
        )
    _, processes = launch.process_range(recipe)
    if not arguments.no_picture:
        require_matplotlib("picture")
    name, as_json = Path(arguments.recipe).stem, arguments.json
    target = TuneTarget.of(name, recipe, processes, machine_key(arguments.device))

    with output_folder(target.folder(arguments.runs), name) as folder:
        data = tune(target, recipe, config, describe_machine(target.machine["gpus"]), progress(arguments))
        fits = data["memory"]["fits"]
        if fits:
            if not arguments.no_picture:
                title = f"{name} on {plural(processes, 'rank')}, {data['machine']['device']}"
                draw(data, title, folder / "tune.png")
            write_tuning(folder, data)
    if as_json:
        print_json({**data, "folder": str(folder) if fits else None})
    else:
        show(data, len(config.settings))
    if not fits:
        return EXIT_DIFFERS
    if not as_json:
        print(f"{'written':<20}{folder / 'tune.json'}{'' if arguments.no_picture else ', tune.png'}")
        print(f"{'used by':<20}samestep train {arguments.recipe} --processes {processes}{_same_options(arguments)}")
    return EXIT_DONE


def _same_options(arguments: argparse.Namespace) -> str:
    """Return the options with which a training command finds these settings."""
    words = ["--set", *arguments.overrides] if arguments.overrides else []
    defaults = {"strategy": None, "mesh": None, "shares": None, "device": "auto", "devices": None, "runs": Path("runs")}
    for name, default in defaults.items():
        if getattr(arguments, name) != default:
            words += [f"--{name}", str(getattr(arguments, name))]
    return "".join(f" {shlex.quote(word)}" for word in words)


def _tune_config(arguments: argparse.Namespace, launch: LaunchOptions) -> TuneConfig:
    from samestep.tools.tune.tune import TuneConfig

    step_options = [] if arguments.rules == "none" else arguments.rules.split(",")
    if not all(name in STEP_OPTIONS for name in step_options):
        expected = f"none, or a list of {', '.join(STEP_OPTIONS)}"
        raise InputError(f"--try {arguments.rules}", expected, "--try threads", code="E_VALUE")
    if not 0 < arguments.seconds < 600:
        raise InputError(f"--seconds {arguments.seconds:g}", "> 0 and < 600", "--seconds 0.5", code="E_VALUE")
    return TuneConfig(
        settings=grid(arguments.workers, arguments.prefetch),
        step_options=step_options,
        memory=arguments.memory,
        seconds=arguments.seconds,
        rounds=_ROUNDS,
        options=RunOptions(device=arguments.device, quiet=arguments.json),
        preload=PRELOAD,
        environment=launch.environment,
    )
