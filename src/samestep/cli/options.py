"""Options of commands, declared as fields of frozen dataclasses; checks of input and output of several commands."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from samestep.config import DeviceKind
from samestep.errors import InputError
from samestep.loggers.logger import to_json_line

Options = TypeVar("Options")


# --- declarations of options ---


def option(help: str, metavar: str | None = None, *, default: Any = None, **settings: Any) -> Any:
    """Declare an option of a command; `settings` are further arguments of `add_argument`, and the `flag`."""
    if metavar is not None:
        settings["metavar"] = metavar
    return field(default=default, metadata={"help": help, **settings})


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """Declare a positional argument of a command."""
    return field(metadata={"help": help, "metavar": metavar, "flag": None, **settings})


def add_fields(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add the declared options of a class, each in the group of the class that declares it.

    Types of fields select the conversion: numbers above 0, paths, `Literal` choices, and switches
    for `bool`.
    """
    hints = get_type_hints(kind)
    owners = {
        name: base
        for base in reversed(kind.__mro__)
        for name in vars(base).get("__annotations__", ())
    }
    groups: dict[str | None, Any] = {None: parser}
    for entry in fields(kind):
        if not entry.metadata:
            continue
        title = vars(owners[entry.name]).get("group")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        settings = {**_conversion(hints[entry.name]), **entry.metadata}
        flag = settings.pop("flag", f"--{entry.name.replace('_', '-')}")
        if flag is None:
            groups[title].add_argument(entry.name, **settings)
        else:
            groups[title].add_argument(flag, dest=entry.name, **settings)


def _conversion(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for the type of a field."""
    kind = hint
    if NoneType in get_args(hint):
        kind = get_args(hint)[0]
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    converters = {int: integer, Path: Path}
    if kind in converters:
        return {"type": converters[kind]}
    return {}


def options_of(kind: type[Options], arguments: Any, **others: Any) -> Options:
    """Return a dataclass of options; options that the command lacks, or that are None, keep their defaults."""
    values = {entry.name: getattr(arguments, entry.name, None) for entry in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if value is not None} | others)


def integer(text: str, least: int = 1) -> int:
    """Return the integer of an option."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return value


def count(text: str) -> int:
    """Return the integer of at least 0 of an option."""
    return integer(text, 0)


def names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(filter(None, text.split(",")))


def integers(text: str) -> tuple[int, ...]:
    """Return the integers above 0 of a comma-separated list."""
    return tuple(map(integer, text.split(",")))


def counts(text: str) -> tuple[int, ...]:
    """Return the integers of at least 0 of a comma-separated list."""
    return tuple(map(count, text.split(",")))


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """Output as JSON."""

    json: bool = option("print the result as one JSON object on standard output", default=False)

    def note(self, text: str) -> None:
        """Print a line on standard error; with `--json`, nothing."""
        if not self.json:
            print(text, file=sys.stderr, flush=True)

    def result(self, value: Mapping[str, Any], *lines: str) -> None:
        """Print a result as lines; with `--json`, as one JSON object."""
        print(to_json_line(value) if self.json else "\n".join(lines), flush=True)


@dataclass(frozen=True, kw_only=True)
class DeviceOption:
    """Type of the device."""

    device: DeviceKind = option("device type (default auto)", default="auto")


@dataclass(frozen=True, kw_only=True)
class SetOption:
    """Overrides of a recipe."""

    overrides: Sequence[str] = option(
        "override a key of the recipe, such as batch_size=128 or optimizer.options.lr=0.05",
        "KEY=VALUE",
        default=(),
        flag="--set",
        action="extend",
        nargs="+",
    )


@dataclass(frozen=True, kw_only=True)
class RunArgument:
    """Directory of a run, with a checkpoint."""

    folder: Path = argument("RUN", "directory of the run")
    checkpoint: str = option(
        "best, last, epoch-N, or a step (default best)", "WHICH", default="best"
    )
    trust: bool = option(
        "import the code that the recipe of the run names (docs/security.md)", default=False
    )


# --- input and output ---


def option_conflict(value: str, fix: str = "leave one of the options out") -> InputError:
    """Return the error of options that exclude each other, or that need each other."""
    return InputError(value, "options that belong together", fix, code="E_OPTION_CONFLICT")


def require_file(path: Path) -> None:
    """Raise an `InputError` unless the path is a file."""
    if not path.is_file():
        raise InputError(
            f"{path} is not a file", "an existing file", "check the path", code="E_FILE_MISSING"
        )


def require_new_file(path: Path) -> None:
    """Raise an `InputError` if the output path exists, or is not in a folder."""
    if path.exists() or not path.parent.is_dir():
        problem = (
            "exists" if path.exists() else f"cannot be written: there is no folder {path.parent}"
        )
        expected = "a new file in an existing folder"
        raise InputError(f"{path} {problem}", expected, "--out with another name", code="E_OUTPUT")


@contextmanager
def output_errors(value: str, expected: str, fix: str) -> Iterator[None]:
    """Report an `OSError` of the block as an `InputError` about the output."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{value}: {error.strerror}", expected, fix, code="E_OUTPUT") from error


def timed_name(runs: Path, stem: str) -> str:
    """Return `stem` with date and time, and a number if several runs start within one second."""
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    return next(candidate for candidate in candidates if not (runs / candidate).exists())


@contextmanager
def output_folder(out: Path | None, stem: str, option: str = "--out") -> Iterator[Path]:
    """Create the folder of an option, by default `runs/STEM-TIME`; remove new folders that stay empty."""
    folder = out or Path("runs") / timed_name(Path("runs"), stem)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with output_errors(f"{folder} cannot be created", "a writable folder", f"{option} DIR"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        for path in created:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()
