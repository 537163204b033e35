"""Mode of a script: whether it, or a module of its folder, imports Samestep."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from samestep.launcher.source_files import is_users_file, specs_of

PACKAGE = "samestep"


class Mode(StrEnum):
    """How a script runs on several processes: text of the first line of a run."""

    UNCHANGED = "calls of its models are divided"
    SAMESTEP = "it imports samestep"
    OWN_GROUP = "it creates a process group of its own"


def mode_of(script: Path, *, is_module: bool, own_group: bool) -> Mode:
    """Return the mode of a script, or of a module with its name as `script`."""
    if own_group:
        return Mode.OWN_GROUP
    file, package = _file_of_module(str(script)) if is_module else (script, "")
    if file is not None and imports_samestep(file, package):
        return Mode.SAMESTEP
    return Mode.UNCHANGED


def imports_samestep(script: Path, package: str = "") -> bool:
    """Whether a script imports Samestep, in its own code or in that of modules which it imports.

    Reads the source, and runs nothing. Modules of the standard library and installed packages are
    left out.

    Args:
        script: file of the script.
        package: complete name of the package that contains it, for relative imports.
    """
    # Over files as Python would import them, with the folder of the script first on the path.
    depth = package.count(".") + 1 if package else 0
    path = [str(script.resolve().parents[depth]), *sys.path]
    waiting = [(script, package)]
    seen = {script.resolve()}
    while waiting:
        file, package = waiting.pop()
        for name in _imported(file, package):
            if name.partition(".")[0] == PACKAGE:
                return True
            for imported in _files(name, path):
                if imported[0].resolve() not in seen:
                    seen.add(imported[0].resolve())
                    waiting.append(imported)
    return False


def _imported(file: Path, package: str) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):  # it fails later, with its own error
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # no package: the import fails later, too
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield base
                # A name of a package can be a module.
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _files(name: str, path: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield the user's files that the import of a name runs, each with the name of its package."""
    for spec in specs_of(name, path):
        if spec.origin is not None and spec.origin.endswith(".py") and is_users_file(spec.origin):
            yield Path(spec.origin), spec.parent or ""


def _file_of_module(name: str) -> tuple[Path | None, str]:
    """Return the file that `python -m name` runs, or None, and the name of its package."""
    # The working directory first, as `python -m` does.
    files = list(_files(name, ["", *sys.path]))
    if not files:
        return None, ""
    file, package = files[-1]
    main = file.with_name("__main__.py")
    if package == name and main.is_file():
        return (main, package)
    return (file, package)


def uses_samestep(function: Callable[..., Any]) -> bool:
    """Whether a function uses Samestep, itself or in functions that it names.

    A function of a module uses what the module imports; a notebook is no module with a file.
    """
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        while isinstance(value, functools.partial):
            value = value.func
        name = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            name = value.__name__
        if str(name).partition(".")[0] == PACKAGE:
            return True
        if id(value) in seen or isinstance(value, ModuleType):
            continue
        seen.add(id(value))
        module = sys.modules.get(str(name))
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and name != "__main__":
            package = getattr(module, "__package__", "") or ""
            if is_users_file(file) and imports_samestep(Path(file), package):
                return True
        elif isinstance(value, type):
            waiting += vars(value).values()
        elif isinstance(value, FunctionType):
            names = _names(value.__code__)
            if PACKAGE in names:
                return True
            waiting += [value.__globals__[one] for one in names if one in value.__globals__]
    return False


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
