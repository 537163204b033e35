"""Options of commands, declared as fields of dataclasses; those of several commands.

Also checks of input and output files. Nothing here imports recipes, so that help is fast.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from samestep.cli.commands import recipe_summaries
from samestep.config import DeviceKind, MeshConfig, StrategyConfig
from samestep.config.key_suggestions import SYNONYMS, nearest_path, suggest
from samestep.config.strategy import AXES, StrategyName
from samestep.distributed.env import expand_path
from samestep.errors import InputError
from samestep.loggers.logger import to_json_line
from samestep.report_text import printable
from samestep.runs import run_folder

Options = TypeVar("Options")
# Not `shipped_recipes()`, whose module imports pydantic: the help of most commands names them.
_RECIPES = ", ".join(recipe_summaries())
TRUST = "import the code that the recipe of the run names (docs/security.md)"
_SETTING = re.compile(r"[A-Za-z_][\w.-]*=")
# Options without a meaning for a script.
_OF_RECIPES = ("strategy", "mesh", "per_device_batch_size", "accumulate", "workers")


# --- declarations of options ---


def option(help: str, metavar: str | None = None, *, default: Any = None, **settings: Any) -> Any:
    """Declare an option, whose default is added to its help.

    `settings` are further arguments of `add_argument`, and the `flag`.
    """
    if metavar is not None:
        settings["metavar"] = metavar
    return field(default=default, metadata={"help": help, **settings})


def argument(metavar: str, help: str, *, default: Any = MISSING, **settings: Any) -> Any:
    """Declare a positional argument."""
    return field(
        default=default, metadata={"help": help, "metavar": metavar, "flag": None, **settings}
    )


def add_fields(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add the declared options of a class, each in the group of the class that declares it.

    Types of fields select the conversion: numbers above 0, paths, `Literal` choices, and switches
    for `bool`.
    """
    hints = get_type_hints(kind)
    # `fields` has inherited options too, but each belongs to the group of its own class.
    owners = {
        name: base
        for base in reversed(kind.__mro__)
        for name in vars(base).get("__annotations__", ())
    }
    groups: dict[str | None, Any] = {None: parser}
    # Arguments of any number come last; `sorted` keeps the order of the others.
    for entry in sorted(fields(kind), key=lambda entry: entry.metadata.get("nargs") == "*"):
        if not entry.metadata:  # no option, such as the arguments after `--`
            continue
        title = vars(owners[entry.name]).get("group")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        settings = {**_conversion(hints[entry.name]), **entry.metadata}
        settings["help"] += _default_text(entry)
        if settings.get("nargs") == "*":
            settings["default"] = ()  # argparse: otherwise one is required
        flag = settings.pop("flag", f"--{entry.name.replace('_', '-')}")
        if flag is None:
            groups[title].add_argument(entry.name, **settings)
        else:
            groups[title].add_argument(flag, dest=entry.name, **settings)


def _default_text(entry: Field[Any]) -> str:
    default = entry.default
    # Some options say themselves what their default means.
    if default in (None, False, (), MISSING) or "(default" in entry.metadata["help"]:
        return ""
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return f" (default {default})"


def _conversion(kind: Any) -> dict[str, Any]:
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    converters = {int: integer, Path: expanded}
    if kind in converters:
        return {"type": converters[kind]}
    return {}


def options_of(kind: type[Options], arguments: Any, **others: Any) -> Options:
    """Return a dataclass of options; those that are absent or None keep their defaults."""
    # Names connect the options of a command with those of a run, a plan or a job.
    values = {entry.name: getattr(arguments, entry.name, None) for entry in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if value is not None} | others)


def expanded(text: str) -> Path:
    """Return the path of an option, with `~` and `$VAR` expanded."""
    return Path(expand_path(text))


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


def parse_settings(arguments: Sequence[str], path_keys: Sequence[str]) -> list[str]:
    """Return the settings `key=value` of the arguments after a recipe or a run.

    A path that exists is the data: the value of the keys `path_keys`.

    Raises:
        InputError: an argument is neither.
    """
    settings = []
    for position, text in enumerate(arguments):
        path = expand_path(text)
        if _SETTING.match(text):
            settings.append(text)
        elif Path(path).exists():
            # As JSON: the value is read as YAML, in which a path can be a number.
            settings += [f"{key}={json.dumps(path)}" for key in path_keys]
        else:
            problem = f"{text} is neither a setting nor a path in {Path.cwd()}"
            expected = "settings key=value, or a path that exists: the data of the recipe"
            fix = _fix_of_argument(text, arguments[position + 1 :])
            raise InputError(problem, expected, fix, code="E_FILE_MISSING")
    return settings


def _fix_of_argument(text: str, following: Sequence[str]) -> str:
    """Return the fix of an argument that is no setting and no path: the nearest of both kinds."""
    near = nearest_path(expanded(text))
    if near is not None:
        return f"did you mean {near}?"
    key = suggest(text, [name for name in SYNONYMS.values() if not name.startswith("-")])
    if key is not None:
        value = next((one for one in following if "=" not in one), "VALUE")
        return f"did you mean {key}={value}?"
    return "give the path of a file or a folder that exists"


def parse_process_count(text: str) -> int:
    """Return a number of processes; text that is not a positive integer is an `InputError`."""
    # `int` also accepts `1_0`, spaces and digits of other scripts.
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        expected = "a number from 1 on; --help has other values"
        raise InputError(f"--processes {text}", expected, "--processes 2", code="E_PROCESSES")
    return int(text)


# --- options of several commands ---


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """Output as JSON."""

    json: bool = option("print the result as one JSON object on standard output", default=False)

    def note(self, text: str) -> None:
        """Print a line on standard error; with `--json`, nothing."""
        if not self.json:
            print(printable(text), file=sys.stderr, flush=True)

    def result(self, value: Mapping[str, Any], *lines: str) -> None:
        """Print a result as lines; with `--json`, as one JSON object."""
        text = printable("\n".join(lines))
        if self.json:
            text = to_json_line(value)
        print(text, flush=True)


@dataclass(frozen=True, kw_only=True)
class DeviceOption:
    """Type of the device."""

    device: DeviceKind = option("device type", default="auto")


@dataclass(frozen=True, kw_only=True)
class WorkersOption:
    """Loader processes."""

    group: ClassVar = "loader (results do not depend on these options)"

    workers: int | None = option(
        "loader processes per rank (default: depends on the cores)", "N", type=count
    )


@dataclass(frozen=True, kw_only=True)
class SetOption:
    """Settings of a recipe."""

    path_keys: ClassVar[Sequence[str]] = ("data.options.path",)

    overrides: Sequence[str] = argument(
        "KEY=VALUE",
        "settings of the recipe, such as epochs=5 or lr=0.05; or a file or folder with data",
        nargs="*",
        default=(),
    )


@dataclass(frozen=True, kw_only=True)
class RunArgument:
    """Directory of a run, with a checkpoint."""

    folder: Path = argument("RUN", "name or directory of the run", type=run_folder)
    checkpoint: str = option("best, last, epoch-N, or a step", "WHICH", default="best")
    trust: bool = option(TRUST, default=False)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(SetOption):
    """Recipe with overrides."""

    recipe: str = argument("RECIPE", f"{_RECIPES}, or a YAML file")


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(RecipeOptions):
    """Recipe, or a script with its arguments after `--`."""

    recipe: str = argument(
        "SUBJECT", f"{_RECIPES}, a YAML file; or a Python script, with its arguments after --"
    )
    script_arguments: Sequence[str] = ()

    def script(self) -> Path | None:
        """Return the script; None for a recipe."""
        path = Path(self.recipe)
        if path.suffix != ".py":
            if self.script_arguments:
                value = f"{self.recipe} with arguments after --"
                raise option_conflict(value, "leave out -- and what follows")
            return None
        if self.overrides:
            fix = f"arguments of the script follow --: {self.recipe} -- ARGUMENTS"
            raise option_conflict(f"{self.overrides[0]} after a script", fix)
        for name in _OF_RECIPES:
            if getattr(self, name, None):
                value = f"{name} of a recipe with a script"
                raise option_conflict(value, "set the value in the script")
        require_file(path)
        return path


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Parallel strategy in place of that of the recipe."""

    group: ClassVar = (
        "strategy (results are equal to rounding; under exact to the bit, "
        "tp with step.tensor_slices)"
    )

    strategy: StrategyName | None = option("parallel strategy (docs/guides/strategies/index.md)")
    mesh: str | None = option(f"sizes of the axes {', '.join(AXES)}", "AXIS=N,...")

    def strategy_overrides(self) -> list[str]:
        """Return the overrides of the recipe of these options."""
        section: dict[str, Any] = {}
        if self.mesh is not None:
            section["mesh"] = _parse_mesh(self.mesh, f"--mesh {self.mesh}")
        if self.strategy is not None:
            # Replaces the complete section: options of another strategy have no meaning for this
            # one.
            return [f"strategy={json.dumps({'name': self.strategy, **section})}"]
        return [f"strategy.{key}={json.dumps(value)}" for key, value in section.items()]


def parse_strategy(text: str) -> StrategyConfig:
    """Return the strategy of `NAME` or `NAME:AXIS=N,...`."""
    name, colon, sizes = text.partition(":")
    mesh = MeshConfig()
    if colon:
        mesh = MeshConfig(**_parse_mesh(sizes, f"--layout {text}"))
    return StrategyConfig(name=name, mesh=mesh)  # type: ignore[arg-type]


def _parse_mesh(text: str, option: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        is_number = size.isascii() and size.isdigit() and int(size) > 0
        if axis not in AXES or axis in sizes or not is_number:
            expected = f"AXIS=N, separated by commas, each axis once: {', '.join(AXES)}"
            raise InputError(option, expected, "--mesh replicate=2,tensor=2", code="E_MESH")
        sizes[axis] = int(size)
    return sizes


# --- input and output ---


def option_conflict(value: str, fix: str = "leave one of the options out") -> InputError:
    """Return the error of options that exclude each other, or that need each other."""
    return InputError(value, "options that belong together", fix, code="E_OPTION_CONFLICT")


def require_file(path: Path) -> None:
    """Raise an `InputError` unless the path is a file."""
    if not path.is_file():
        value = f"{path} is not a file"
        near = nearest_path(path)
        fix = "check the path" if near is None else f"did you mean {near}?"
        raise InputError(value, "an existing file", fix, code="E_FILE_MISSING")


def require_new_file(path: Path) -> None:
    """Raise an `InputError` if the output path exists, or is not in a folder."""
    problem = ""
    if path.exists():
        problem = "exists"
    elif not path.parent.is_dir():
        problem = f"cannot be written: there is no folder {path.parent}"
    if problem:
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
    """Return `stem` with date and time, and a number if several runs start in one second."""
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if not (runs / candidate).exists())


@contextmanager
def output_folder(out: Path | None, stem: str, option: str = "--out") -> Iterator[Path]:
    """Create a folder, by default `runs/STEM-TIME`; remove new folders that stay empty."""
    folder = out or Path("runs") / timed_name(Path("runs"), stem)
    # The innermost first: a folder is empty only after its subfolders.
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with output_errors(f"{folder} cannot be created", "a writable folder", f"{option} DIR"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        for path in created:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()
