"""`samestep diff`: the first difference of two runs, or of a run and a step of it that is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from samestep.cli.commands import PRELOAD
from samestep.cli.launch_options import LaunchOptions
from samestep.cli.options import JsonOption, argument, option, option_conflict, options_of
from samestep.cli.run_plans import plan_to_replay
from samestep.config import resolve_mesh
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, printable
from samestep.runs import LOOP
from samestep.units import plural

if TYPE_CHECKING:
    from samestep.tools.diff import Comparison, Replayed, Replays, Subject
    from samestep.tools.run_log import Run


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, LaunchOptions):
    """Find the first difference of two runs, or compute a step again.

    The recipes, environments and checksums of two runs are compared; the first step with different
    checksums of both runs is computed again to find the first different tensor. With --step, a step
    of one run or of two runs is computed again and compared with the log. The runs are only read.
    Exit codes: 0 equal, 1 failed run, 2 invalid input, 3 different.
    """

    example: ClassVar = "samestep diff runs/first runs/second"

    folders: Sequence[Path] = argument("RUN", "directory of a run", nargs="+", type=Path)
    step: int | None = option("step to compute again (needed with one run)", "N")
    no_replay: bool = option("compare the logs only", default=False)
    trust: bool = option(
        "import the code that the recipe of the run names (docs/security.md)", default=False
    )
    accept_changes: bool = option(
        "replay although the user's Python modules have changed", default=False
    )


def run(options: Options) -> int:
    """Compare and print; return 0 without a difference, otherwise 3."""
    from samestep.tools.diff import compare_logs
    from samestep.tools.run_log import read_runs

    if len(options.folders) > 2 or (len(options.folders) == 1 and options.step is None):
        fix = "samestep diff RUN RUN, or samestep diff RUN --step N"
        raise option_conflict(f"{plural(len(options.folders), 'run')} without --step", fix)
    runs = read_runs(options.folders)
    replays: list[Replayed] = []
    logs = None
    finding = None
    note = None
    if options.step is not None:
        replays, finding = _replay(runs, options.step - 1, options.step, options)
    else:
        logs = compare_logs(*runs)
        has_script = any((run.folder / LOOP).is_file() for run in runs)
        if logs.recipe or has_script or options.no_replay:
            note = "not replayed: --no-replay, different recipes, or the run of a script"
        elif logs.first_different is not None:
            replays, finding = _replay(runs, logs.last_equal, logs.first_different, options)
    equal = finding is None if logs is None else logs.first_different is None and logs.compared > 0
    data = {"runs": [str(run.folder) for run in runs], "equal": equal, "note": note}
    data |= {
        "finding": None if finding is None else asdict(finding),
        "replays": list(map(asdict, replays)),
    }
    data |= {} if logs is None else asdict(logs)
    lines = {} if logs is None else _compared(logs)
    if note is not None and not equal:
        lines["note"] = [note]
    if replays:
        lines["replays"] = list(map(_replayed, replays))
        lines["difference"] = [] if finding is None else [finding.text]
    texts = []
    for title, values in lines.items():
        texts += [
            f"{'' if number else title:<14}{printable(line)}"
            for number, line in enumerate(values or ["equal"])
        ]
    options.result(data, *texts)
    if equal:
        return EXIT_DONE
    return EXIT_DIFFERS


def _compared(logs: Comparison) -> dict[str, list[str]]:
    checksums = "no steps with checksums of both runs"
    if logs.first_different is not None:
        checksums = (
            f"equal up to step {logs.last_equal}, different after step {logs.first_different}"
        )
    elif logs.compared:
        checksums = (
            f"equal after {plural(logs.compared, 'step')}, the last one is step {logs.last_equal}"
        )
    recipe = [f"{line} (changes the mathematics)" for line in logs.recipe]
    return {
        "recipes": recipe + logs.other_keys,
        "environment": logs.environment,
        "checksums": [checksums],
    }


def _replayed(replayed: Replayed) -> str:
    step = replayed.first_different
    compared = plural(replayed.compared, "checksum")
    result = (
        f"has the logged {compared}"
        if step is None
        else f"differs from the log from step {step} on"
    )
    steps = f"steps {replayed.first + 1} to {max(replayed.checksums)} on {plural(replayed.processes, 'process')}"
    return f"{replayed.run}, {steps}: {result}"


def _replay(runs: list[Run], after: int, step: int, options: Options) -> Replays:
    """Compute one or two runs again, from a checkpoint before the last checksum up to `step`."""
    from samestep.tools.diff import ReplayOptions, no_checksum, replay_and_compare

    subjects = []
    for run in runs:
        logged = max((number for number in run.events.checksums if number <= step), default=None)
        if logged is None:
            raise no_checksum(f"{run.folder} has no checksum up to step {step}")
        subjects.append(_subject(run, min(after, logged - 1), step, options))
    replay_options = options_of(
        ReplayOptions, options, preload=PRELOAD, environment=options.environment
    )
    return replay_and_compare(subjects, step, replay_options, options.note)


def _subject(run: Run, begin: int, step: int, options: Options) -> Subject:
    """Return a run to compute from a checkpoint at or before `begin`, on the ranks of `step` unless set."""
    from samestep.tools.diff import Subject

    starts = [start for start in run.starts if start.get("from_step", 0) < step]
    start = starts[-1] if starts else {}
    processes = start.get("processes", 1)
    is_chosen = options.processes is not None or options.devices is not None
    plan = plan_to_replay(run.folder, begin, trust=options.trust)
    if is_chosen:
        processes = options.process_range(plan.recipe)[1]
    resolve_mesh(plan.recipe.strategy, processes, plan.recipe.microbatch_count)
    return Subject(run.folder, plan.recipe, plan.checkpoint, processes, run.events.checksums)
