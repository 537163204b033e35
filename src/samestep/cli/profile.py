"""`samestep profile`: where the time of a recipe's step goes, and what would help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli import device_batch, layouts, member, options, ranks
from samestep.errors import EXIT_DONE
from samestep.recipes.parse import load_recipe, shipped_recipes
from samestep.record.events import several_lines


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "profile",
        help="show where the time of a step goes, and what would help",
        description="Train some steps of a recipe and say where their time goes: waiting for data, forward, backward, "
        "communication, optimizer, checkpoints; which rank the others wait for; and the changes that would help most, "
        "each with what it saves at most. Writes traces for Perfetto and TensorBoard.",
        epilog="example: samestep profile digits --processes 2 --active 20 --ranks 0",
    )
    parser.add_argument("recipe", help=f"{', '.join(shipped_recipes())}, or a YAML file")
    options.add_set_option(parser)
    device_batch.add_option(parser)
    options.add_machine_options(parser)
    layouts.add_options(parser)
    group = parser.add_argument_group("what is looked at")
    group.add_argument("--wait", type=int, default=2, metavar="N", help="steps that nobody looks at (default 2)")
    group.add_argument(
        "--warmup",
        type=int,
        default=2,
        metavar="N",
        help="steps after those that are not counted, and once more under torch's profiler (default 2)",
    )
    group.add_argument("--active", type=int, default=20, metavar="N", help="steps that are counted (default 20)")
    group.add_argument(
        "--traced",
        type=int,
        default=3,
        metavar="N",
        help="steps after them under torch's profiler (default 3; 0: none)",
    )
    group.add_argument("--ranks", default="all", metavar="N,N,...", help="ranks that are traced (default all)")
    group.add_argument(
        "--checkpoint-every", type=int, metavar="STEPS", help="save as a run would, every so many steps (default: not)"
    )
    group = parser.add_argument_group("where it goes")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="for profile.json, profile.png and traces (default runs/profile-...)"
    )
    group.add_argument("--no-picture", action="store_true", help="no profile.png")
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, look and print."""
    # Imported here: the other commands have no use for them.
    from rich.console import Console

    from samestep.record.confusion import require_pictures
    from samestep.tools.bench.machine import describe
    from samestep.tools.profile import page
    from samestep.tools.profile.plan import Plan, ranks_of
    from samestep.tools.profile.profiled import profile

    member.refuse_launchers("profile")
    member.settled(arguments)
    recipe = load_recipe(arguments.recipe, [*layouts.overrides(arguments), *device_batch.overrides(arguments)])
    devices = ranks.devices(arguments.devices, arguments.device)
    _, processes = ranks.bounds(arguments.processes, arguments.device, recipe, devices)
    looked_at = ranks_of(arguments.ranks, processes)
    chosen = options.run_options(arguments)
    if not arguments.no_picture:
        require_pictures("profile")
    stem = Path(arguments.recipe).stem

    def planned(folder: Path) -> Plan:
        return Plan(
            wait=arguments.wait,
            warmup=arguments.warmup,
            active=arguments.active,
            traced=arguments.traced,
            ranks=looked_at,
            folder=folder,
            options=chosen,
        )

    # Planned before there is a folder: what cannot be is refused.
    steps = f"{planned(Path()).steps} steps of {stem} on {processes} rank{'s' if processes > 1 else ''}"
    console = Console(stderr=True, quiet=arguments.json)
    with options.new_folder(arguments.out, f"profile-{stem}") as folder:
        console.print(f"training {steps}", highlight=False, soft_wrap=True)
        gpus = [] if arguments.device == "cpu" else ranks.gpu_names()
        found = profile(
            stem,
            recipe,
            planned(folder),
            processes,
            describe(gpus),
            ranks.PRELOAD,
            devices.variables() if devices else {},
        )
        (folder / "profile.json").write_text(several_lines(found.as_data()), encoding="utf-8")
        if not arguments.no_picture:
            page.draw(found, folder / "profile.png")
    if arguments.json:
        options.print_json({**found.as_data(), "folder": str(folder)})
    else:
        page.show(found)
        print()
        print("\n".join(page.written(found, is_drawn=not arguments.no_picture)))
    return EXIT_DONE
