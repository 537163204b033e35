"""Options of commands, declared as fields of frozen dataclasses; checks of input and output of several commands."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from samestep.checkpoint.files import replacing
from samestep.config import DeviceKind, RunOptions
from samestep.errors import InputError
from samestep.loggers.logger import to_json_line
from samestep.recipes.recipe_files import shipped_recipes

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

    Types of fields select the conversion: numbers, paths, `Literal` choices, and switches for `bool`.
    """
    hints = get_type_hints(kind)
    owners = {name: base for base in reversed(kind.__mro__) for name in vars(base).get("__annotations__", ())}
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
    return {"type": kind} if kind in (int, float, Path) else {}


def options_of(kind: type[Options], arguments: Any, **others: Any) -> Options:
    """Return a dataclass of options; options that the command lacks, or that are None, keep their defaults."""
    values = {entry.name: getattr(arguments, entry.name, None) for entry in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if value is not None} | others)


def positive(text: str) -> int:
    """Return the integer above 0 of an option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def count(text: str) -> int:
    """Return the integer of at least 0 of an option."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def positive_float(text: str) -> float:
    """Return the number above 0 of an option."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(filter(None, text.split(",")))


def integers(text: str) -> tuple[int, ...]:
    """Return the integers above 0 of a comma-separated list."""
    return tuple(map(positive, text.split(",")))


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
    checkpoint: str = option("best, last, epoch-N, or a step (default best)", "WHICH", default="best")
    trust: bool = option("import the code that the recipe of the run names (docs/security.md)", default=False)


# --- input and output ---


def option_conflict(value: str, expected: str, fix: str = "leave one of the two options out") -> InputError:
    """Return the error of options that exclude each other, or that need each other."""
    return InputError(value, expected, fix, code="E_OPTION_CONFLICT")


def require_file(path: Path, option: str = "") -> None:
    """Raise an `InputError` unless the path is a file."""
    problem = "is not a file"
    try:
        is_file = path.is_file()
    except OSError as error:
        is_file, problem = False, f"cannot be read: {error.strerror}"
    if not is_file:
        value = f"{f'{option} ' if option else ''}{path} {problem}"
        raise InputError(value, expected="an existing file", fix="check the path", code="E_FILE_MISSING")


def require_new_file(path: Path) -> None:
    """Raise an `InputError` if the output path exists, or is not in a folder."""
    expected, fix = "a new file: no file is overwritten", "--out with another name, or remove the file"
    with output_errors(f"{path} cannot be written", expected, fix):
        if path.exists():
            raise InputError(f"{path} exists", expected, fix, code="E_OUTPUT")
    if not path.parent.is_dir():
        value, expected = f"there is no folder {path.parent}", "--out in an existing folder"
        raise InputError(value, expected, "create the folder", code="E_OUTPUT")


@contextmanager
def output_errors(value: str, expected: str, fix: str) -> Iterator[None]:
    """Report an `OSError` of the block as an `InputError` about the output."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{value}: {error.strerror}", expected, fix, code="E_OUTPUT") from error


def write_output(text: str, out: Path, option: str, mark: str, kind: str) -> None:
    """Write a file atomically; only an earlier file of the kind, which begins with `mark`, is overwritten."""
    with output_errors(f"{out} cannot be written", "a file in a writable folder", f"{option} with another path"):
        if out.exists():
            with out.open("rb") as file:
                is_earlier = file.read(len(mark)) == mark.encode()
            if not is_earlier:
                raise InputError(
                    f"{out} is not a {kind}",
                    expected=f"a new file, or an earlier {kind}",
                    fix=f"{option} with another name, or remove the file",
                    code="E_OUTPUT",
                )
        with replacing(out) as temporary:
            temporary.write_text(text, encoding="utf-8")


def timed_name(runs: Path, stem: str) -> str:
    """Return `stem` with date and time, and a number if several runs start within one second."""
    return unused_name(runs, f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")


def unused_name(runs: Path, name: str) -> str:
    """Return `name`, or the name with the first number from 2 that no folder in `runs` has."""
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


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    print(to_json_line(value), flush=True)


# --- legacy ---


def number(
    option: str, *, type: Callable[[str], float] = int, zero: bool = False, has_default: bool = True
) -> Callable[[str], float]:
    """Return a parser of numbers above 0, or of at least 0 if `zero` is set."""
    fix = f"leave {option} out for its default" if has_default else f"{option} 1"

    def parse(text: str) -> float:
        value = type(text)
        if not (value > 0 or (zero and value == 0)):
            expected = f"{option} {'>=' if zero else '>'} 0"
            raise InputError(f"{option} {value:g}", expected, fix, code="E_VALUE")
        return value

    parse.__name__ = type.__name__  # argparse prints this name for text that is not a number
    return parse


_OPTIONS: dict[str, dict[str, Any]] = {
    "--set": {
        "dest": "overrides",
        "action": "extend",
        "nargs": "+",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "override a key of the recipe, such as batch_size=128 or optimizer.options.lr=0.05",
    },
    "--devices": {
        "metavar": "I,J,...",
        "help": "GPUs of the ranks, as positions among the visible GPUs; one rank per GPU unless --processes is "
        "smaller (default: the first ones)",
    },
    "--share-gpu": {
        "action": "store_true",
        "help": "let several ranks use one GPU; they communicate through host memory (not with pp)",
    },
    "--device": {
        "choices": get_args(DeviceKind),
        "default": "auto",
        "help": "device type (default auto)",
    },
    "--per-device-batch-size": {
        "type": number("--per-device-batch-size"),
        "metavar": "N",
        "help": "set batch_size to N times --processes; the run keeps this batch_size on any number of processes",
    },
    "--accumulate": {
        "type": number("--accumulate"),
        "metavar": "K",
        "help": "set microbatches to K times --processes: each process computes K microbatches of a step one after "
        "another; batch_size stays the samples of a step, or is K times larger with --per-device-batch-size",
    },
    "--workers": {
        "type": number("--workers", zero=True),
        "metavar": "N",
        "help": "loader processes per rank (default: depends on the cores)",
    },
    "--runs": {"type": Path, "default": Path("runs"), "metavar": "DIR", "help": "folder of runs (default runs)"},
    "--trust": {"action": "store_true", "help": "import the code that the recipe of the run names (docs/security.md)"},
    "--json": {"action": "store_true", "help": "print the result as one JSON object on standard output"},
}


def add_options(group: Any, *names: str) -> None:
    """Add options that have the same meaning in several commands."""
    for name in names:
        group.add_argument(name, **_OPTIONS[name])


def add_number(
    group: Any, option: str, *, type: Callable[[str], float] = int, zero: bool = False, **texts: Any
) -> None:
    """Add an option with a number above 0, or of at least 0 if `zero` is set."""
    parse = number(option, type=type, zero=zero, has_default="default" in texts)
    group.add_argument(option, type=parse, **texts)


def add_recipe_argument(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and `--set`."""
    parser.add_argument("recipe", help=f"{', '.join(shipped_recipes())}, or a YAML file")
    add_options(parser, "--set")


def add_subject_argument(parser: argparse.ArgumentParser) -> None:
    """Add a recipe, `--set`, or a script, whose arguments after `--` become `script_arguments`."""
    text = f"{', '.join(shipped_recipes())}, a YAML file; or a Python script, with its arguments after --"
    parser.add_argument("recipe", metavar="SUBJECT", help=text)
    add_options(parser, "--set")
    parser.set_defaults(script_arguments=[])


# Options without a meaning for a script.
_RECIPE_OPTIONS = (
    "--strategy",
    "--mesh",
    "--shares",
    "--per-device-batch-size",
    "--accumulate",
    "--workers",
    "--prefetch",
)


def script_of(arguments: argparse.Namespace) -> Path | None:
    """Return the script of a command with `add_subject_argument`; None for a recipe.

    Raises:
        InputError: the script is missing, or an option of recipes is set.
    """
    path = Path(arguments.recipe)
    if path.suffix != ".py":
        if arguments.script_arguments:
            value = f"{arguments.recipe} with arguments after --"
            raise option_conflict(value, "arguments of a script", "leave the arguments out, or --set KEY=VALUE")
        return None
    names = {option: option.removeprefix("--").replace("-", "_") for option in _RECIPE_OPTIONS}
    for option, name in {"--set": "overrides", **names}.items():
        if getattr(arguments, name, None):
            raise option_conflict(f"{option} with a script", f"{option} with a recipe", "set the value in the script")
    require_file(path)
    return path


def refuse_script(arguments: argparse.Namespace, command: str, fix: str) -> None:
    """Raise an `InputError` if a command that needs a recipe received a script."""
    if Path(arguments.recipe).suffix == ".py":
        raise InputError(
            f"samestep {command} {arguments.recipe} is a script",
            expected=f"a recipe: samestep {command} changes settings that a script sets itself",
            fix=fix,
            code="E_SCRIPT",
        )


def add_run_argument(parser: argparse.ArgumentParser, *, checkpoint: str | None = None) -> None:
    """Add the directory of a run, and `--checkpoint` with a default."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="directory of the run")
    if checkpoint is not None:
        add_options(parser, "--trust")
        text = f"best, last, epoch-N, or a step (default {checkpoint})"
        parser.add_argument("--checkpoint", default=checkpoint, metavar="WHICH", help=text)


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add `--processes`, `--devices`, `--device`, `--workers` and `--prefetch`."""
    group = parser.add_argument_group("machine (results do not depend on these options)")
    text = "number of ranks, or auto: one per GPU, or one per core on a machine without GPUs (default 1)"
    group.add_argument("--processes", metavar="N", help=text)
    add_options(group, "--devices", "--share-gpu", "--device", "--workers")
    text = f"microbatches that each loader process prepares in advance (default {RunOptions.prefetch})"
    group.add_argument("--prefetch", type=int, metavar="N", help=text)


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """Return the run options among the arguments; `--json` leaves only the summary."""
    return options_of(RunOptions, arguments, quiet=arguments.json)


def parse_integers(option: str, text: str, minimum: int = 1) -> list[int]:
    """Return the integers of a comma-separated list; other text is an `InputError`."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) >= minimum for part in parts):
        expected = f"integers of at least {minimum}, separated by commas"
        raise InputError(f"{option} {text}", expected, f"{option} 1,2,4", code="E_VALUE")
    return list(map(int, parts))


def progress(arguments: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints a line on standard error; with `--json`, nothing is printed."""

    def show(text: str) -> None:
        if not arguments.json:
            print(text, file=sys.stderr, flush=True)

    return show
