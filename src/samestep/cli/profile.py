"""`samestep profile`: phases of a step, and changes with the largest possible savings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli.commands import PRELOAD
from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import LaunchOptions, gpu_names
from samestep.cli.options import (
    add_machine_options,
    add_number,
    add_options,
    add_subject_argument,
    options_of,
    output_folder,
    print_json,
    progress,
    run_options,
    script_of,
)
from samestep.cli.recipe_options import add_strategy_options, all_overrides, load_with_microbatches, with_batch_size
from samestep.config import Recipe
from samestep.errors import EXIT_DONE
from samestep.loggers.logger import to_json
from samestep.units import plural


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
