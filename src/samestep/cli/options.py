"""Options that several commands share, and starting ranks with them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from samestep.cli.durations import seconds
from samestep.config import DEFAULT_PREFETCH, RunOptions
from samestep.errors import InputError
from samestep.record.events import one_line


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """`--processes`, `--device`, `--workers` and `--prefetch`: who computes; results do not depend on them."""
    group = parser.add_argument_group("machine (results do not depend on it)")
    group.add_argument(
        "--processes",
        metavar="N",
        help="number of ranks, or auto: one a GPU, or one a core where there is no GPU (default 1)",
    )
    add_devices_option(group)
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where ranks compute")
    group.add_argument("--workers", type=int, metavar="N", help="loader processes a rank (default: what cores allow)")
    group.add_argument(
        "--prefetch", type=int, metavar="N", help=f"shards that each of them makes ahead (default {DEFAULT_PREFETCH})"
    )


def add_devices_option(group: Any) -> None:
    """`--devices`: which GPUs."""
    group.add_argument(
        "--devices",
        metavar="I,J,...",
        help="the GPUs of the ranks, by position among those that this process sees; one rank each unless --processes "
        "says fewer (default: the first ones)",
    )


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """`--set`: overrides of the recipe."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the recipe, such as batch_size=128 or optimizer.options.lr=0.05",
    )


def add_saving_options(parser: argparse.ArgumentParser) -> None:
    """`--checkpoint-every`, `--lose-at-most` and `--keep`."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="also within epochs, every so many steps")
    group.add_argument(
        "--lose-at-most",
        metavar="TIME",
        help="also whenever a kill would cost more work than this: 30s, 5m, 1h",
    )
    group.add_argument("--keep", type=int, default=2, metavar="K", help="how many of the newest stay (default 2)")


def add_check_option(parser: argparse.ArgumentParser) -> None:
    """`--check-every`: comparing ranks while they train."""
    group = parser.add_argument_group("checks (results do not depend on them)")
    group.add_argument(
        "--check-every",
        type=int,
        metavar="STEPS",
        help="compare what ranks hold every so many steps, and what they are about to do before each",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """`--json`: what the command found, for a program."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on standard output")


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """The options of a command as data."""
    lose_at_most = getattr(arguments, "lose_at_most", None)
    prefetch = getattr(arguments, "prefetch", None)
    return RunOptions(
        device=arguments.device,
        workers=arguments.workers,
        prefetch=DEFAULT_PREFETCH if prefetch is None else prefetch,
        checkpoint_every=getattr(arguments, "checkpoint_every", None),
        lose_at_most=None if lose_at_most is None else seconds("--lose-at-most", lose_at_most),
        keep=getattr(arguments, "keep", 2),
        check_every=getattr(arguments, "check_every", None),
        quiet=arguments.json,
    )


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """What an option says that takes several numbers.

    Raises:
        InputError: it says something else.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) >= least for part in parts):
        rule = "positive numbers" if least == 1 else f"numbers from {least} on"
        raise InputError(f"{option} {text}", rule=f"{rule} with commas between", do=f"{option} 1,2,4")
    return list(map(int, parts))


def free_name(runs: Path, stem: str) -> str:
    """`stem`, date and time, and a number where several runs begin in one second."""
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(free for n in count(1) if not (runs / (free := name if n == 1 else f"{name}-{n}")).exists())


@contextmanager
def new_folder(out: Path | None, stem: str) -> Iterator[Path]:
    """The folder of what a command finds; where nothing comes of it, what was made for it goes again.

    Args:
        out: what `--out` says; None for a folder of its own below `runs`, with `stem` in its name.

    Raises:
        InputError: it cannot be made.
    """
    folder = out or Path("runs") / free_name(Path("runs"), stem)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made: {error.strerror}", rule="a folder that can be written", do="--out DIR"
        ) from error
    try:
        yield folder
    except BaseException:
        for path in made:
            if not any(path.iterdir()):
                path.rmdir()
        raise


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    print(one_line(value), flush=True)
