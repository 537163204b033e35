"""`samestep doctor`: check this machine before training."""

from __future__ import annotations

import argparse
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli.commands import PRELOAD
from samestep.cli.launch_options import gpu_names, parse_process_count
from samestep.cli.options import add_number, add_options, option_conflict, print_json, progress
from samestep.distributed.devices import visible_devices
from samestep.distributed.env import Environment, launch_variables, read_environment, read_rendezvous
from samestep.distributed.launcher_detection import Rendezvous
from samestep.distributed.resources import read_processors
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, EXIT_INPUT, InputError
from samestep.tools.doctor.findings import MICROBATCH_BYTES, RANK_BYTES, WORKER_BYTES, Finding, Plan, Verdict, worst
from samestep.units import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

_PACKAGES = ("samestep", "torch", "numpy", "torchvision", "safetensors")
_PLACE = ("rank", "world_size", "local_rank", "local_size", "restarts", "address", "port")
_COLOURS: dict[Verdict, str] = {"pass": "green", "info": "dim", "warn": "yellow", "fail": "red"}


def add_doctor(add_parser: Any) -> None:
    """Add `samestep doctor`."""
    parser = add_parser(
        description="Check packages, GPUs, memory, limits, network, launcher and runs folder, and run a short "
        "self-test. Each finding is pass, info, warn or fail; warn and fail include a fix. Nothing is changed.",
        epilog="examples: samestep doctor; samestep doctor --processes 8 --workers 4 --worker-memory 2GiB; "
        "samestep doctor --bundle report.zip. Exit codes: 0 no failure, 2 invalid input, 3 at least one failure.",
    )
    group = parser.add_argument_group("planned run")
    group.add_argument("--processes", metavar="N", help="ranks on this machine (default: one per GPU, else per core)")
    add_options(group, "--workers")
    add_number(group, "--threads", default=1, metavar="N", help="threads per rank, step.threads (default 1)")
    add_options(group, "--runs")
    for name, default, subject in (
        ("--rank-memory", RANK_BYTES, "memory per rank"),
        ("--worker-memory", WORKER_BYTES, "private memory per worker"),
        ("--microbatch-memory", MICROBATCH_BYTES, "size of one microbatch from a worker"),
    ):
        size = f"{default >> 20}MiB"
        parse = partial(parse_bytes, name)
        group.add_argument(name, type=parse, metavar="SIZE", default=size, help=f"{subject} (default {size})")
    parser.add_argument("--quick", action="store_true", help="skip the self-test; torch is not imported")
    parser.add_argument("--launch", action="store_true", help="show only how ranks would start and connect")
    text = "write a zip for a bug report, without private data"
    parser.add_argument("--bundle", type=Path, metavar="FILE", help=text)
    add_options(parser, "--json")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    """Check and print; return 0 without failures and 3 otherwise."""
    if arguments.launch:
        if arguments.bundle is not None:
            raise option_conflict("--bundle with --launch", "a bundle contains the findings of all checks")
        return _show_launch(as_json=arguments.json)
    # Imported here to keep other commands fast.
    from rich.console import Console

    from samestep.tools.doctor.bundle import write_bundle
    from samestep.tools.doctor.doctor import check, read_facts

    processes = arguments.processes
    facts = read_facts(
        Plan(
            runs=arguments.runs,
            threads=arguments.threads,
            rank_bytes=arguments.rank_memory,
            worker_bytes=arguments.worker_memory,
            microbatch_bytes=arguments.microbatch_memory,
        ),
        ranks=None if processes in (None, "auto") else parse_process_count(processes, " or auto"),
        workers=arguments.workers,
        preload=PRELOAD,
        quick=arguments.quick,
        progress=progress(arguments),
    )
    findings = list(check(facts))
    verdict = worst(findings)
    if arguments.bundle is not None:
        write_bundle(arguments.bundle, facts, findings)
    if arguments.json:
        print_json({"verdict": verdict, "plan": str(facts.plan), "findings": [asdict(finding) for finding in findings]})
    else:
        _print(Console(soft_wrap=False), findings, str(facts.plan))
        if arguments.bundle is not None:
            print(f"bundle  {arguments.bundle}")
    return EXIT_DIFFERS if verdict == "fail" else EXIT_DONE


def _print(console: Console, findings: Sequence[Finding], plan: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(max_width=34)
    table.add_column(overflow="fold")
    for finding in findings:
        lines = [finding.value]
        lines += [f"  expected: {finding.expected}"] if finding.expected else []
        lines += [f"  fix:      {finding.fix}"] if finding.fix else []
        colour = _COLOURS[finding.verdict]
        table.add_row(Text(finding.verdict, colour), Text(finding.name), Text("\n".join(lines)))
    console.print(table)
    counts = Counter(finding.verdict for finding in findings)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _COLOURS)
    console.print(f"\nchecked for {plan}: {summary}", highlight=False, soft_wrap=True)


def _show_launch(*, as_json: bool) -> int:
    """Print the launcher, its variables, and the launch of a command; return 2 for invalid variables."""
    try:
        rendezvous, error = read_rendezvous(), None
    except InputError as invalid:
        rendezvous, error = None, str(invalid)
    environment = read_environment()
    facts: dict[str, Any] = {
        "launcher": _launcher(rendezvous, error),
        "variables": launch_variables(),
        "machine": _machine(environment),
        "network": _network(rendezvous, environment),
        "versions": {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()},
    }
    facts["train"] = _train_launch(rendezvous, error, facts["machine"])
    if as_json:
        print_json(facts)
    else:
        print("\n".join(_launch_lines(facts)))
    return EXIT_DONE if error is None else EXIT_INPUT


def _launcher(rendezvous: Rendezvous | None, error: str | None) -> dict[str, Any]:
    if rendezvous is None:
        why = error or "no launcher's variables are set, or only those of a single process"
        return {"name": None, "why": why, "passed over": []}
    if rendezvous.has_store:
        store = "hosted by the launcher"
    elif rendezvous.port is None:
        store = "hosted by rank 0 on a free port of the loopback interface, published in a file of this user"
    else:
        store = "hosted by rank 0"
    return {
        "name": rendezvous.launcher,
        "why": rendezvous.why,
        "passed over": list(rendezvous.also),
        **{name.replace("_", " "): getattr(rendezvous, name) for name in _PLACE},
        "store": store,
    }


def _machine(environment: Environment) -> dict[str, Any]:
    names = gpu_names()
    identifiers = visible_devices(environment.visible_devices, len(names))
    return {
        "devices": [
            {"position": position, "is": identifier, "name": name}
            for position, (identifier, name) in enumerate(zip(identifiers, names, strict=True))
        ],
        "CUDA_VISIBLE_DEVICES": environment.visible_devices,
        "device order": environment.device_order or "PCI_BUS_ID",
        "cores": read_processors().usable,
        "threads a rank": "step.threads of the recipe (default 1)",
        "system": platform.platform(),
    }


def _network(rendezvous: Rendezvous | None, environment: Environment) -> dict[str, Any]:
    on_one_machine = rendezvous is None or rendezvous.is_on_one_machine
    default = "loopback" if on_one_machine else "selected by gloo: the interface of this machine's host name"
    return {
        "host": socket.gethostname(),
        "all ranks on this machine": on_one_machine,
        "interface": environment.gloo_interface or default,
        "token": "set" if environment.token is not None else "none",
    }


def _train_launch(rendezvous: Rendezvous | None, error: str | None, machine: dict[str, Any]) -> str:
    if error is not None:
        return "samestep train would refuse to start"
    if rendezvous is not None:
        return f"samestep train would be rank {rendezvous.rank} of {rendezvous.world_size}, and start no processes"
    count = len(machine["devices"]) or machine["cores"]
    unit = "GPU" if machine["devices"] else "core"
    return (
        f"samestep train would start 1 process; with --processes auto, {count} (one per {unit}), "
        "but no more than the recipe has microbatches"
    )


def _launch_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    for title, content in facts.items():
        lines.append(title)
        if isinstance(content, dict):
            texts = {name: _format(value).replace("\n", "\n  " + " " * 27) for name, value in content.items()}
            lines += [f"  {name:<27}{text}" for name, text in texts.items()] or ["  none"]
        else:
            lines.append(f"  {content}")
    return lines


def _format(value: Any) -> str:
    if isinstance(value, dict):  # a device
        return f"{value['position']} is {value['is']} ({value['name']})"
    text = "; ".join(map(_format, value)) if isinstance(value, list) else value
    return "none" if text in (None, "") else str(text)
