"""`samestep tune`: number of loader processes and prefetch of a recipe on this machine."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli.commands import PRELOAD
from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import LaunchOptions
from samestep.cli.options import (
    add_options,
    add_recipe_argument,
    output_folder,
    parse_integers,
    print_json,
    progress,
    refuse_script,
)
from samestep.cli.recipe_options import add_strategy_options, all_overrides, load_with_microbatches
from samestep.config import RunOptions
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.tools.tune.settings import PREFETCH, STEP_OPTIONS, WORKERS, TuneTarget, grid, machine_key, write_tuning
from samestep.units import parse_bytes, plural

if TYPE_CHECKING:
    from samestep.tools.tune.tune import TuneConfig

_ROUNDS = 5


def add_tune(add_parser: Any) -> None:
    """Add `samestep tune`."""
    parser = add_parser(
        description="Find by short trials the number of loader processes and the prefetch of a recipe on this machine, "
        "check that microbatches fit into memory, and measure the effect of threads, channels-last, compilation "
        "and CUDA graphs. Loader settings are saved, and train and resume use them; the others are only reported.",
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
