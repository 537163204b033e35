"""Replacement of functions wherever modules hold them, also in modules that are imported later."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import quote, unquote

from samestep.script.file_journal import PATHS

# These are used by C, and by the import of modules.
_LOW_MODULES = {"posix", "_io", "_sqlite3"}
# Functions and methods that open a file in C++: name, position and name of the argument with the
# path, whether they write; None if the next argument is a mode.
_CPP_FUNCTIONS: dict[str, tuple[tuple[str, int, str, bool | None], ...]] = {
    "torch.serialization": (("save", 1, "f", True), ("load", 0, "f", False)),
    "torch.jit._script": (("RecursiveScriptModule.save", 1, "f", True),),
    "torch.jit._serialization": (("load", 0, "f", False),),
    "torchvision.io.image": (("write_file", 0, "filename", True), ("read_file", 0, "path", False)),
    "safetensors": (("serialize_file", 1, "filename", True), ("safe_open", 0, "filename", False)),
    "pyarrow": (("OSFile", 0, "path", None),),  # pandas writes and reads Parquet by it
    "pyarrow.parquet.core": (("write_table", 1, "where", True), ("read_table", 0, "source", False)),
    "pyarrow.feather": (("write_feather", 1, "dest", True), ("read_feather", 0, "source", False)),
    "tokenizers": (("Tokenizer.save", 1, "path", True), ("Tokenizer.from_file", 0, "path", False)),
    "cv2": (("imwrite", 0, "filename", True), ("imread", 0, "filename", False)),
}
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments by position and by name


class Writer(Protocol):
    """Replacements of functions of files on one rank; each list has pairs of a function and its replacement."""

    def replacements(self) -> list[tuple[Any, Any]]:
        """Return replacements of functions of Python."""

    def reader(self, real: Callable[..., Any], position: int, keyword: str) -> Callable[..., Any]:
        """Return the replacement of a function that reads the file of an argument in C++."""

    def writer(self, real: Callable[..., Any], position: int, keyword: str) -> Callable[..., Any]:
        """Return the replacement of a function that writes the file of an argument in C++."""


class Replaced:
    """Functions that are replaced until `undo`; also a finder of modules, which replaces functions after an import."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._pairs: list[tuple[Any, Any]] = []
        self._methods: list[tuple[Any, str, Any]] = []  # and what was in their place
        self._uses_descriptors = shutil._use_fd_functions  # type: ignore[attr-defined]
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # `rmtree` uses paths
        self._replace(writer.replacements())
        for name in _CPP_FUNCTIONS:
            if name in sys.modules:
                self._replace_in_cpp(name)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Find a module with functions in C++, and let its loader replace them."""
        spec = PathFinder.find_spec(name, path, target) if name in _CPP_FUNCTIONS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    self._replace_in_cpp(name)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec

    def undo(self) -> None:
        """Restore all functions."""
        sys.meta_path.remove(self)
        shutil._use_fd_functions = self._uses_descriptors  # type: ignore[attr-defined]
        _replace_everywhere({id(new): real for real, new in self._pairs})
        for holder, method, before in self._methods:
            setattr(holder, method, before)

    def _replace_in_cpp(self, name: str) -> None:
        for function, *where in _CPP_FUNCTIONS[name]:
            owner, _, method = function.rpartition(".")
            holder = getattr(sys.modules[name], owner, None) if owner else sys.modules[name]
            if holder is None or method not in vars(holder):
                continue
            before = vars(holder)[method]
            real = getattr(holder, method)
            new = functools.update_wrapper(self._in_cpp(real, *where), real, updated=())
            if owner:
                self._methods.append((holder, method, before))
                setattr(
                    holder, method, staticmethod(new) if isinstance(before, staticmethod) else new
                )
            else:
                self._replace([(before, new)])

    def _in_cpp(self, real: Any, position: Any, keyword: Any, writes: Any) -> Callable[..., Any]:
        read = self._writer.reader(real, position, keyword)
        write = self._writer.writer(real, position, keyword)
        if writes is not None:
            if writes:
                return write
            return read

        def call(*arguments: Any, **options: Any) -> Any:
            mode = options.get("mode", "".join(map(str, arguments[position + 1 : position + 2])))
            return (write if set("wax+") & set(mode) else read)(*arguments, **options)

        return call

    def _replace(self, pairs: list[tuple[Any, Any]]) -> None:
        self._pairs += pairs
        _replace_everywhere({id(real): new for real, new in pairs})


def _replace_everywhere(replacements: Mapping[int, Any]) -> None:
    """Replace values of names of all modules, and the few others that hold functions of files.

    Args:
        replacements: from the `id` of a value to the new value.
    """
    modules = [module for name, module in sys.modules.items() if name not in _LOW_MODULES]
    tables = [vars(module) for module in modules if isinstance(module, ModuleType)]
    if (datasource := sys.modules.get("numpy.lib._datasource")) is not None:
        tables.append(datasource._file_openers._file_openers)
    for names in tables:
        for name, value in list(names.items()):
            new = replacements.get(id(value))
            if new is not None:
                names[name] = new
    # Not `supports_dir_fd`: the replacements have no argument `dir_fd`.
    for functions in (os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        known = [function for function in functions if id(function) in replacements]
        functions.difference_update(known)
        functions.update([replacements[id(function)] for function in known])
    for method in vars(tempfile._TemporaryFileCloser).values():  # type: ignore[attr-defined]
        if defaults := getattr(method, "__defaults__", None):
            method.__defaults__ = tuple(
                replacements.get(id(default), default) for default in defaults
            )


def path_argument(
    position: int, keyword: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Callable[[str], Call]]:
    """Return an argument, or None unless it is a path, and a function that puts another path in its place."""
    is_named = keyword in options
    value = (
        options[keyword] if is_named else arguments[position] if position < len(arguments) else None
    )

    def put(path: str) -> Call:
        if is_named:
            return arguments, {**options, keyword: path}
        return (*arguments[:position], path, *arguments[position + 1 :]), options

    return value if isinstance(value, PATHS) else None, put


def database_path(
    arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Callable[[str], Call]]:
    """Return the path of a database, or None, and the function of `path_argument`."""
    path, put = path_argument(0, "database", arguments, options)
    if options.get("uri") and isinstance(path, str) and path.startswith("file:"):
        name, mark, query = path.removeprefix("file:").partition("?")
        path = "" if "mode=memory" in query else unquote(name)
        return path or None, lambda target: put(f"file:{quote(target)}{mark}{query}")
    return None if path in ("", ":memory:") else path, put
