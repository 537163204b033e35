"""`samestep profile`: phases of a step, and the slowest rank."""

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
        "backward, communication, optimizer; and the slowest rank. Writes traces for Perfetto and TensorBoard.",
        epilog="example: samestep profile digits --processes 2 --active 20; for a script: "
        "samestep profile train.py --processes 2 -- --epochs 1",
    )
    add_subject_argument(parser)
    add_options(parser, "--per-device-batch-size", "--accumulate")
    add_machine_options(parser)
    add_strategy_options(parser)
    group = parser.add_argument_group("measurement")
    add_number(group, "--warmup", zero=True, default=4, help="unmeasured steps at the start (default 4)")
    add_number(group, "--active", default=20, help="measured steps (default 20)")
    text = "following steps with torch's profiler, after one more warm-up step (default 3; 0: none)"
    add_number(group, "--traced", zero=True, default=3, help=text)
    group = parser.add_argument_group("output")
    text = "for profile.json and traces (default runs/profile-...)"
    group.add_argument("--out", type=Path, metavar="DIR", help=text)
    add_options(parser, "--json")
    parser.set_defaults(run=_profile)


def _profile(arguments: argparse.Namespace) -> int:
    """Train, measure and print."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.profile.profile import Plan, Script, profile, profile_data, show
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
    stem = Path(arguments.recipe).stem
    with output_folder(arguments.out, f"profile-{stem}") as folder:
        plan = options_of(Plan, arguments, folder=folder, options=run_options(arguments))
        progress(arguments)(f"training {plan.steps} steps of {stem} on {plural(processes, 'rank')}")
        machine = describe_machine([] if arguments.device == "cpu" else gpu_names())
        measured = profile(subject, plan, processes, PRELOAD, launch.environment or {})
        data = profile_data(subject, plan, measured, machine)
        (folder / "profile.json").write_text(to_json(data), encoding="utf-8")
    if arguments.json:
        print_json({**data, "folder": str(folder)})
    else:
        show(plan, measured)
    return EXIT_DONE
