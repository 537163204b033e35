"""What several commands do about faults: watch for hangs, give time to end, start again."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.runtime.crew import RankError, Terms
from samestep.runtime.launch import HANG_AFTER, Outcome
from samestep.runtime.restarts import Restarts

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def add_fault_options(parser: argparse.ArgumentParser) -> None:
    """`--max-restarts`, `--hang-after` and `--grace`."""
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
        type=seconds,
        default=HANG_AFTER,
        metavar="TIME",
        help="end the run, with the stacks of all ranks, when none has got on for so long, such as 90s or 10m "
        "(default 10m)",
    )
    group.add_argument(
        "--grace",
        type=seconds,
        metavar="TIME",
        help="asked to end (Ctrl-C, SIGTERM, SIGUSR1, closed terminal), end at once if step and checkpoint take longer "
        "than this (default: as long as they take)",
    )


def seconds(text: str) -> float:
    """`30`, `30s`, `5m` or `1h` in seconds; for argparse, which tells of what is not."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or not float(found[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: a positive number with s, m or h, such as 30s")
    return float(found[1]) * _UNITS[found[2]]


def keep_going(
    arguments: argparse.Namespace,
    bounds: tuple[int, int],
    attempt: Callable[[int, Terms], Outcome],
    *,
    log_dir: Path | None,
    first_step: int = 0,
    newest: Callable[[], int] = lambda: 0,
) -> Any:
    """What rank 0's function returns in the attempt that ends well.

    Args:
        bounds: with how few ranks the run goes on, and with how many it begins.
        attempt: starts that many ranks, after the newest whole checkpoint if it is not the first.
        first_step: optimizer steps done before the first attempt.
        newest: optimizer steps of the newest whole checkpoint.

    Raises:
        RankError: a rank failed, and the run is not to be started again.
    """
    restarts = Restarts(arguments.max_restarts, *bounds)
    begun = first_step
    while True:
        terms = Terms(arguments.hang_after, arguments.grace, until_saved=restarts.is_short, log_dir=log_dir)
        try:
            outcome = attempt(restarts.processes, terms)
        except RankError as error:
            told = restarts.again(error, begun + error.steps)
            if told is None:
                raise
        else:
            if outcome.asked_by is not None or not terms.until_saved or not _is_stopped(outcome):
                return outcome.value
            told = restarts.grow()
        begun = newest()
        print(f"{told}; going on after step {begun}", file=sys.stderr, flush=True)


def _is_stopped(outcome: Outcome) -> bool:
    return isinstance(outcome.value, dict) and bool(outcome.value.get("stopped"))
