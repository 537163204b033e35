"""What several commands do about faults: watch for hangs, give time to end, start again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.cli.durations import seconds
from samestep.runtime.crew import RankError, Terms
from samestep.runtime.launch import Outcome
from samestep.runtime.restarts import Restarts
from samestep.runtime.watchdog import HANG_AFTER


def add_fault_options(parser: argparse.ArgumentParser) -> Any:
    """`--max-restarts`, `--hang-after` and `--grace`; the group that they are in."""
    group = parser.add_argument_group("faults (results do not depend on them)")
    group.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="start again up to K times when ranks fail, from the newest whole checkpoint (default 0)",
    )
    group.add_argument(
        "--hang-after",
        default=f"{HANG_AFTER:g}s",
        metavar="TIME",
        help="end the run, with the stacks of all ranks, when none has got on for so long, such as 90s or 10m "
        "(default 10m)",
    )
    group.add_argument(
        "--grace",
        metavar="TIME",
        help="asked to end (Ctrl-C, SIGTERM, SIGUSR1, closed terminal), end at once if step and checkpoint take longer "
        "than this (default: as long as they take)",
    )
    return group


def keep_going(
    arguments: argparse.Namespace,
    bounds: tuple[int, int],
    attempt: Callable[[int, Terms], Outcome],
    *,
    log_dir: Path | None,
    first_step: int = 0,
    newest: Callable[[], int] | None = None,
) -> Outcome:
    """How the attempt ended that ended well.

    Args:
        bounds: with how few ranks the run goes on, and with how many it begins.
        attempt: starts that many ranks, after the newest whole checkpoint if it is not the first.
        first_step: optimizer steps done before the first attempt.
        newest: optimizer steps of the newest whole checkpoint, where that is known.

    Raises:
        RankError: a rank failed, and the run is not to be started again.
    """
    restarts = Restarts(arguments.max_restarts, *bounds)
    hang_after = seconds("--hang-after", arguments.hang_after)
    grace = seconds("--grace", arguments.grace) if arguments.grace is not None else None
    begun = first_step
    while True:
        terms = Terms(hang_after, grace, until_saved=restarts.is_short, log_dir=log_dir)
        try:
            outcome = attempt(restarts.processes, terms)
        except RankError as error:
            told = restarts.again(error, begun + error.steps)
            if told is None:
                raise
        else:
            if outcome.asked_by is not None or not terms.until_saved or not _is_stopped(outcome):
                return outcome
            told = restarts.grow()
        if newest is not None:
            begun = newest()
            told = f"{told}; going on after step {begun}"
        print(told, file=sys.stderr, flush=True)


def _is_stopped(outcome: Outcome) -> bool:
    return isinstance(outcome.value, dict) and bool(outcome.value.get("stopped"))
