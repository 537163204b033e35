"""`samestep diff`: the first difference of two runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli.external_launcher import require_single_process
from samestep.cli.options import add_options, print_json, progress
from samestep.cli.replay import add_replay_options, replay_options, subject_of
from samestep.cli.run_plans import reading
from samestep.errors import EXIT_DIFFERS, EXIT_DONE
from samestep.report_limits import printable
from samestep.runs import LOOP
from samestep.units import plural

if TYPE_CHECKING:
    from samestep.tools.replay.diff import Comparison, Finding
    from samestep.tools.report.run import Run

_LISTED = 12  # differences of environments in the text


def add_diff(add_parser: Any) -> None:
    """Add `samestep diff`."""
    parser = add_parser(
        description="Compare recipes and environments of two runs, find the first step with different checksums of the "
        "state, and compute this step of both runs again to find the first different tensor. The runs are only read.",
        epilog="example: samestep diff runs/first runs/second. "
        "Exit codes: 0 equal, 1 failed run, 2 invalid input, 3 different.",
    )
    parser.add_argument("folders", type=Path, nargs=2, metavar="RUN", help="directory of a run")
    parser.add_argument("--no-replay", action="store_true", help="compare the logs only")
    add_replay_options(parser)
    add_options(parser, "--json")
    parser.set_defaults(run=_diff, from_start=False)


def _diff(arguments: argparse.Namespace) -> int:
    """Compare and print; return 0 if all common checksums are equal, otherwise 3."""
    from samestep.tools.replay.diff import compare_logs, find_difference
    from samestep.tools.report.run import read_runs

    require_single_process("diff")
    runs = read_runs(arguments.folders)
    logs, finding, note = compare_logs(runs), None, None
    if not arguments.json:
        _show_logs(logs, runs)
    if logs.first_different is not None:
        note = _without_replay(arguments, runs, logs)
        if note is None:
            subjects = [subject_of(run, logs.last_equal, logs.first_different, arguments, []) for run in runs]
            with reading(*(subject.checkpoint for subject in subjects)):
                finding = find_difference(subjects, logs, replay_options(arguments), progress(arguments))
    equal = logs.first_different is None and bool(logs.compared)
    if arguments.json:
        data = {"runs": [str(run.folder) for run in runs], "equal": equal, **asdict(logs), "note": note}
        print_json({**data, "finding": finding.data() if finding is not None else None})
    else:
        _show_finding(finding, note, logs)
    return EXIT_DONE if equal else EXIT_DIFFERS


def _without_replay(arguments: argparse.Namespace, runs: list[Run], logs: Comparison) -> str | None:
    """Return the reason for a comparison without replays, if there is one."""
    if arguments.no_replay:
        return "not replayed (--no-replay)"
    if logs.recipe:
        return "not replayed: the recipes differ"
    if len({(run.folder / LOOP).is_file() for run in runs}) > 1:
        return "not replayed: one run is that of a recipe, the other that of a script"
    return None


def _show_logs(logs: Comparison, runs: list[Run]) -> None:
    _show("recipes", [f"{line} (changes the mathematics)" for line in logs.recipe] + logs.other_keys)
    _show("environment", logs.environment)
    names = [str(run.folder) for run in runs]
    if not logs.compared:
        print(f"{'checksums':<14}no steps with checksums of both runs")
    elif logs.first_different is None:
        print(f"{'checksums':<14}equal after {plural(logs.compared, 'step')}, the last one is step {logs.last_equal}")
    elif logs.last_equal:
        print(f"{'checksums':<14}equal up to step {logs.last_equal}, different after step {logs.first_different}")
    else:
        print(
            f"{'checksums':<14}different after step {logs.first_different}, the first one with checksums of both runs"
        )
    for name, count in zip(names, logs.only, strict=True):
        if count:
            print(f"{'':<14}{name} has {plural(count, 'later checksum')}")


def _show(title: str, lines: list[str]) -> None:
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    for number, line in enumerate([*lines[:_LISTED], *more] or ["equal"]):
        print(f"{'' if number else title:<14}{printable(line)}")


def _show_finding(finding: Finding | None, note: str | None, logs: Comparison) -> None:
    if finding is not None:
        for number, line in enumerate(finding.replays):
            print(f"{'' if number else 'replays':<14}{printable(line)}")
        print(f"{'difference':<14}{printable(finding.text)}")
    elif note is not None:
        print(f"{'note':<14}{printable(note)}")
