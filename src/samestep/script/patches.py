"""Replacement of attributes and functions for the duration of a script.

Functions of files are replaced wherever modules hold them, also in modules that are imported later.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import quote, unquote

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
PATHS = (str, bytes, os.PathLike)
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments by position and by name


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes that a module or a class has itself inside the block."""
    before = {name: vars(owner)[name] for name in values}  # `getattr` would bind class methods
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def is_main_thread_of(process: int) -> bool:
    """Whether this is the main thread of a process: threads and children have own inputs."""
    is_main = threading.current_thread() is threading.main_thread()
    return os.getpid() == process and is_main


class Writer(Protocol):
    """Replacements of functions of files on one rank."""

    def replacements(self) -> list[tuple[Any, Any]]:
        """Return pairs of a function of Python and its replacement."""

    def read_in_cpp(self, path: Any, read: Callable[[Any], Any]) -> Any:
        """Return the result of `read`, which reads a file in C++, for the file at `path`."""

    def write_in_cpp(self, path: Any, write: Callable[[Any], Any]) -> Any:
        """Return the result of `write`, which writes a file in C++, for the file at `path`."""


class Replaced:
    """Functions of files that are replaced until `undo`.

    Also a finder of modules, which replaces functions in C++ after an import.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._pairs: list[tuple[Any, Any]] = []
        self._methods: list[tuple[Any, str, Any]] = []  # and what was in their place
        self._uses_descriptors = shutil._use_fd_functions  # type: ignore[attr-defined]
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # `rmtree` uses paths
        pairs = writer.replacements()
        for name in _CPP_FUNCTIONS:
            if name in sys.modules:
                pairs += self._pairs_in_cpp(name)
        self._replace(pairs)  # at once: each time reads all names of all modules
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Find a module with functions in C++, and let its loader replace them."""
        if name not in _CPP_FUNCTIONS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                # An import can end after `undo`.
                if self in sys.meta_path:
                    self._replace(self._pairs_in_cpp(name))

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec

    def undo(self) -> None:
        """Restore all functions."""
        sys.meta_path.remove(self)
        shutil._use_fd_functions = self._uses_descriptors  # type: ignore[attr-defined]
        _replace_everywhere({id(new): real for real, new in self._pairs})
        for holder, method, before in self._methods:
            setattr(holder, method, before)

    def _pairs_in_cpp(self, name: str) -> list[tuple[Any, Any]]:
        """Return functions of a module and their replacements; replace methods."""
        pairs = []
        for function, position, keyword, writes in _CPP_FUNCTIONS[name]:
            owner, _, method = function.rpartition(".")
            holder: Any = sys.modules[name]
            if owner:
                holder = getattr(holder, owner, None)
            if holder is None or method not in vars(holder):
                continue
            before = vars(holder)[method]
            real = getattr(holder, method)
            call = self._in_cpp(real, position, keyword, writes)
            # Without `__dict__`, since some of these are classes.
            new: Any = functools.update_wrapper(call, real, updated=())
            if owner:
                self._methods.append((holder, method, before))
                if isinstance(before, staticmethod):
                    new = staticmethod(new)
                setattr(holder, method, new)
            else:
                pairs.append((before, new))
        return pairs

    def _in_cpp(
        self, real: Any, position: int, keyword: str, writes: bool | None
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path, put = path_argument(position, keyword, arguments, options)
            if path is None:
                return real(*arguments, **options)

            def at(other: Any) -> Any:
                positional, named = put(other)
                return real(*positional, **named)

            is_writing = writes
            if writes is None:
                mode = options.get("mode", "".join(map(str, arguments[position + 1 :][:1])))
                is_writing = bool(set("wax+") & set(mode))
            if is_writing:
                return self._writer.write_in_cpp(path, at)
            return self._writer.read_in_cpp(path, at)

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
        for name in [name for name, value in names.items() if id(value) in replacements]:
            names[name] = replacements[id(names[name])]
    # Not `supports_dir_fd`: the replacements have no argument `dir_fd`.
    for functions in (os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        known = [function for function in functions if id(function) in replacements]
        functions.difference_update(known)
        functions.update([replacements[id(function)] for function in known])
    for method in vars(tempfile._TemporaryFileCloser).values():  # type: ignore[attr-defined]
        if defaults := getattr(method, "__defaults__", None):
            method.__defaults__ = tuple(replacements.get(id(one), one) for one in defaults)


def path_argument(
    position: int, keyword: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Callable[[str], Call]]:
    """Return an argument, or None unless it is a path, and a function that puts another path."""
    value = options.get(keyword)
    if keyword not in options and position < len(arguments):
        value = arguments[position]

    def put(path: str) -> Call:
        if keyword in options:
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
        path = None if "mode=memory" in query else unquote(name) or None
        return path, lambda target: put(f"file:{quote(target)}{mark}{query}")
    return None if path in ("", ":memory:") else path, put
