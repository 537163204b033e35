"""`samestep doctor`: whether this machine is fit to train on, and what to do where it is not."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli import how_ranks_start, options, ranks
from samestep.cli.sizes import size
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.tools.doctor.finding import Finding, Verdict, worst
from samestep.tools.doctor.plan import RANK_BYTES, SHARD_BYTES, WORKER_BYTES, Plan, Wishes

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS: dict[Verdict, str] = {"pass": "green", "info": "dim", "warn": "yellow", "fail": "red"}


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine before training on it",
        description="Check libraries, devices, memory, limits, network, launcher and the folder of runs; start "
        "ranks that meet and sum. Each line is pass, info, warn or fail, and says what to do. Nothing is changed.",
        epilog="examples: samestep doctor; samestep doctor --processes 8 --workers 4 --worker-memory 2GiB; "
        "samestep doctor --bundle report.zip. Exit codes: 0 nothing failed, 2 the input was wrong, 3 something failed.",
    )
    group = parser.add_argument_group("what is to run")
    group.add_argument("--processes", metavar="N", help="ranks here (default: one a GPU, or one a core without)")
    group.add_argument("--workers", type=int, metavar="N", help="loader processes a rank (default: what cores allow)")
    group.add_argument("--threads", type=int, default=1, metavar="N", help="of a rank, step.threads (default 1)")
    group.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default runs)")
    for name, default, what in (
        ("--rank-memory", RANK_BYTES, "memory of one rank"),
        ("--worker-memory", WORKER_BYTES, "memory that one worker has for itself"),
        ("--shard-memory", SHARD_BYTES, "what a worker hands over at a time, one shard"),
    ):
        told = f"{default >> 20}MiB"
        group.add_argument(name, metavar="SIZE", default=told, help=f"{what} (default {told})")
    parser.add_argument("--quick", action="store_true", help="start no ranks, so that torch is not asked")
    parser.add_argument("--launch", action="store_true", help="only how ranks would start and meet here")
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE", help="write a zip for a bug report, with nothing private"
    )
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and print; 0 if nothing failed, 3 if something did."""
    if arguments.launch:
        if arguments.bundle is not None:
            raise InputError("--bundle with --launch", rule="a bundle holds findings", do="leave one of them out")
        return how_ranks_start.show(as_json=arguments.json)
    # Imported here: the other commands have no use for them.
    from rich.console import Console

    from samestep.tools.doctor.bundle import write_bundle
    from samestep.tools.doctor.examination import examine
    from samestep.tools.doctor.facts import read_facts

    wishes, errors = _wishes(arguments), Console(stderr=True, quiet=arguments.json)
    facts = read_facts(
        wishes,
        preload=ranks.PRELOAD,
        quick=arguments.quick,
        tell=lambda text: errors.print(text, highlight=False, soft_wrap=True),
    )
    findings = examine(facts)
    verdict = worst(findings)
    if arguments.bundle is not None:
        write_bundle(arguments.bundle, facts, findings)
    if arguments.json:
        options.print_json(
            {"verdict": verdict, "plan": str(facts.plan), "findings": [asdict(finding) for finding in findings]}
        )
    else:
        _print(Console(soft_wrap=False), findings, str(facts.plan))
        if arguments.bundle is not None:
            print(f"bundle  {arguments.bundle}")
    return EXIT_DIFFERS if verdict == "fail" else EXIT_DONE


def _wishes(arguments: argparse.Namespace) -> Wishes:
    processes, workers, threads = arguments.processes, arguments.workers, arguments.threads
    if threads < 1:
        raise InputError(f"--threads {threads}", rule="1 or more", do="--threads 1")
    if workers is not None and workers < 0:
        raise InputError(f"--workers {workers}", rule="0 or more", do="--workers 0")
    plan = Plan(
        runs=arguments.runs,
        threads=threads,
        rank_bytes=size("--rank-memory", arguments.rank_memory),
        worker_bytes=size("--worker-memory", arguments.worker_memory),
        shard_bytes=size("--shard-memory", arguments.shard_memory),
    )
    count = None if processes in (None, "auto") else ranks.number_of_processes(processes)
    return Wishes(plan, count, workers)


def _print(console: Console, findings: Sequence[Finding], plan: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(max_width=34)
    table.add_column(overflow="fold")
    for finding in findings:
        lines = [finding.value]
        lines += [f"  rule: {finding.rule}"] if finding.rule else []
        lines += [f"  do:   {finding.do}"] if finding.do else []
        colour = _COLOURS[finding.verdict]
        table.add_row(Text(finding.verdict, colour), Text(finding.name), Text("\n".join(lines)))
    console.print(table)
    counts = Counter(finding.verdict for finding in findings)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _COLOURS)
    console.print(f"\nchecked for {plan}: {told}", highlight=False, soft_wrap=True)
