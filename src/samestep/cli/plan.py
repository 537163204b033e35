"""`samestep plan`: step time and memory of all layouts of a recipe on a number of devices."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from samestep.cli.commands import PRELOAD
from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import gpu_names
from samestep.cli.options import (
    add_number,
    add_options,
    add_recipe_argument,
    output_folder,
    print_json,
    progress,
    refuse_script,
    run_options,
)
from samestep.cli.recipe_options import load_with_microbatches
from samestep.distributed.resources import read_processors
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.loggers.logger import to_json
from samestep.recipes.recipe_files import recipe_data
from samestep.units import parse_bandwidth, parse_bytes, parse_duration, plural

# Latency of a message between nodes: InfiniBand and fast Ethernet have less, TCP more.
_NODE_LATENCY = 20e-6
# Unexpected interruptions of 16,384 GPUs in 54 days: Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 5.
_DEVICE_HOURS = 16384 * 54 * 24 / 419


def add_plan(add_parser: Any) -> None:
    """Add `samestep plan`."""
    parser = add_parser(
        description="Predict memory per device and step time of each layout of a recipe on a number of devices, from "
        "measurements of about 30 seconds on this machine; choose the fastest layout that fits into memory; "
        "and predict the speed on thousands of devices.",
        epilog="example: samestep plan digits --devices 4 --memory 2GiB",
    )
    add_recipe_argument(parser)
    group = parser.add_argument_group("devices to plan for")
    add_number(group, "--devices", required=True, metavar="N", help="number of devices, one rank each")
    memory = partial(parse_bytes, "--memory")
    group.add_argument(
        "--memory", type=memory, metavar="SIZE", help="memory of a device, such as 24GB (default: no limit)"
    )
    text = "number of nodes with equally many devices (default 1)"
    add_number(group, "--nodes", default=1, metavar="M", help=text)
    bandwidth = partial(parse_bandwidth, "--link")
    text = "link of a node to the others, such as 100Gbit (default %(default)s)"
    group.add_argument("--link", type=bandwidth, default="100Gbit", metavar="RATE", help=text)
    group = parser.add_argument_group("failures")
    text = "mean time between failures of one device in hours (default %(default).0f: Llama 3 on 16,384 GPUs)"
    add_number(group, "--mtbf", type=float, default=_DEVICE_HOURS, metavar="HOURS", help=text)
    restart = partial(parse_duration, "--restart")
    text = "time from a failure to the next step (default %(default)s)"
    group.add_argument("--restart", type=restart, default="2m", metavar="TIME", help=text)
    group = parser.add_argument_group("measurement")
    text = "approximate time of each measurement (default %(default)s)"
    add_number(group, "--seconds", type=float, default=0.5, metavar="S", help=text)
    add_options(group, "--device", "--workers")
    group = parser.add_argument_group("output")
    text = "folder for plan.json and plan.png (default runs/plan-...)"
    group.add_argument("--out", type=Path, metavar="DIR", help=text)
    group.add_argument("--no-picture", action="store_true", help="write no plan.png")
    add_options(parser, "--json")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    """Measure, predict and print; return 3 if no layout fits into memory."""
    # Imported here: the other commands do not need these modules.
    from samestep.metrics.class_report import require_matplotlib
    from samestep.tools.plan.collectives import Link
    from samestep.tools.plan.plan import PlanConfig, draw, plan, show
    from samestep.tools.plan.scaling import Failures
    from samestep.tools.timing import describe_machine

    require_single_process("plan")
    refuse_script(arguments, "plan", "samestep plan with a recipe that has the same model, data and batch size")
    _require_equal_nodes(arguments.devices, arguments.nodes)
    recipe = load_with_microbatches(arguments, arguments.overrides)
    if not arguments.no_picture:
        require_matplotlib("picture")
    gpus = [] if arguments.device == "cpu" else gpu_names()
    config = PlanConfig(
        devices=arguments.devices,
        nodes=arguments.nodes,
        link=Link(_NODE_LATENCY, 1 / arguments.link),
        memory=arguments.memory,
        failures=Failures(arguments.mtbf, arguments.restart),
        local=len(gpus) or 2 * read_processors().usable,
        seconds=arguments.seconds,
        options=run_options(arguments),
        preload=PRELOAD,
    )
    machine, stem = describe_machine(gpus), Path(arguments.recipe).stem
    with output_folder(arguments.out, f"plan-{stem}") as folder:
        data = {
            "recipe": recipe_data(recipe),
            "machine": machine,
            **plan(recipe, config, progress(arguments)),
        }
        (folder / "plan.json").write_text(to_json(data), encoding="utf-8")
        if data["curve"] and not arguments.no_picture:
            title = f"{stem}: {data['chosen']} on {plural(arguments.devices, 'device')}, {machine['device']}"
            draw(data, title, folder / "plan.png")
    if arguments.json:
        print_json({**data, "folder": str(folder)})
    else:
        show(data)
        picture = ", plan.png" if data["curve"] and not arguments.no_picture else ""
        print(f"\n{'written':<12}{folder / 'plan.json'}{picture}")
    return EXIT_DONE if data["chosen"] is not None else EXIT_DIFFERS


def _require_equal_nodes(devices: int, nodes: int) -> None:
    if devices % nodes:
        raise InputError(
            f"--devices {devices} --nodes {nodes}",
            expected="equally many devices on each node",
            fix=f"--devices {-(-devices // nodes) * nodes}",
            code="E_VALUE",
        )
