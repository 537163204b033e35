"""SHA-256 of the user's modules: a run is not continued with other code unnoticed.

The user's modules are those outside of the standard library, of installed packages and of Samestep.
They are known by name, so that a project can move between a stop and a resumption.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from samestep.errors import InputError
from samestep.number_text import plural
from samestep.report_text import printable

if TYPE_CHECKING:
    from samestep.distributed.world import World

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_MAX_NAMED = 10  # modules in one error


class SourceFiles:
    """Hashes of the modules of one process, taken when a module is first seen."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._hashes: dict[str, str] = {}
        self._required: dict[str, str] = {}

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 by module name: of imported modules, and those that the run imported before."""
        return dict(sorted({**self._required, **self._hashes}.items()))

    def note_imports(self) -> None:
        """Hash the modules that were imported since the last call.

        Raises:
            InputError: a module differs from the one with which the run began.
        """
        changed = []
        for name, module in list(sys.modules.items()):
            if name in self._seen:
                continue
            self._seen.add(name)
            file = None
            if isinstance(module, ModuleType) and name != "__mp_main__":  # that is `__main__` again
                file = vars(module).get("__file__")
            if not isinstance(file, str) or not is_users_file(file):
                continue
            digest = _digest(file)
            if digest is None:
                continue
            self._hashes[name] = digest
            if self._required.get(name, digest) != digest:
                changed.append(name)
        if changed:
            raise _code_changed(changed)

    def require(self, recorded: Mapping[str, str], *, accept_changes: bool = False) -> list[str]:
        """Compare modules with recorded hashes, now or at their import; return changed modules.

        A module that an earlier call has compared is not compared again.

        Raises:
            InputError: a module has changed, and changes are not accepted.
        """
        self.note_imports()
        current = {name: self._hashes.get(name) or _digest(_find(name)) for name in recorded}
        new = {name: digest for name, digest in recorded.items() if name not in self._required}
        changed = [name for name, digest in new.items() if current[name] not in (None, digest)]
        if changed and not accept_changes:
            raise _code_changed(changed)
        # A module without a file keeps the recorded hash, and is compared at its import.
        self._required |= {name: current[name] or digest for name, digest in new.items()}
        return changed

    def check_ranks(self, world: World) -> None:
        """Require that all ranks have imported the same code. A collective operation.

        Raises:
            InputError: a module of two ranks differs.
        """
        from samestep.distributed.world import all_gather  # imports torch; launchers do without

        self.note_imports()
        (main_host, first), *others = all_gather([socket.gethostname(), self._hashes], world)
        for rank, (host, hashes) in enumerate(others, 1):
            changed = [name for name, digest in hashes.items() if first.get(name, digest) != digest]
            if changed:
                title = (
                    f"rank {rank} on host {host} imported other code than rank 0 on host "
                    f"{main_host}"
                )
                raise InputError(
                    "\n    ".join([printable(title), *describe_modules(changed)]),
                    expected="the same files on all ranks",
                    fix="do not edit files while the ranks start, and copy the same files to all "
                    "machines",
                    code="E_CODE_CHANGED",
                )


def describe_modules(names: Sequence[str]) -> list[str]:
    """Return one line per module: name and file; the last line counts further modules."""
    lines = []
    for name in names[:_MAX_NAMED]:
        file = getattr(sys.modules.get(name), "__file__", None) or _find(name)
        lines.append(printable(f"{name} ({file})"))
    if len(names) > _MAX_NAMED:
        lines.append(f"and {len(names) - _MAX_NAMED} more")
    return lines


def _code_changed(names: Sequence[str]) -> InputError:
    title = f"{plural(len(names), 'module')} changed since the run began"
    return InputError(
        "\n    ".join([title, *describe_modules(names)]),
        expected="the code with which the run began, so that the result is that of an undisturbed "
        "run",
        fix="undo the change; or continue with the new code: samestep resume RUN --accept-changes, "
        "in a script checkpoints.resume(accept_changes=True)",
        code="E_CODE_CHANGED",
    )


def is_users_file(file: str) -> bool:
    """Whether a file of code is neither Python's, of an installed package, nor of Samestep."""
    is_code = file.endswith(tuple(all_suffixes()))
    if not is_code or any(f"/{name}/" in file for name in _PACKAGE_FOLDERS):
        return False
    return not os.path.abspath(file).startswith(_library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    installed = [path for name in names if (path := sysconfig.get_path(name))]
    folders = [*installed, *map(os.path.realpath, installed), str(Path(__file__).parents[1])]
    return tuple(os.path.join(folder, "") for folder in folders)


def specs_of(name: str, path: Sequence[str]) -> Iterator[ModuleSpec]:
    """Yield the specifications of the packages of a module and of the module, while they exist.

    `importlib.util.find_spec` would import the packages, and run their code.
    """
    search: Sequence[str] | None = path
    parts = name.split(".")
    for number, part in enumerate(parts, start=1):
        if search is None or not part:
            return
        spec = PathFinder.find_spec(".".join(parts[:number]), search)
        if spec is None:
            return
        yield spec
        search = spec.submodule_search_locations


def _find(name: str) -> str | None:
    """Return the file of a module that is not imported, without importing its packages."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):  # a recorded name is input
        return None
    specs = list(specs_of(name, [*sys.path, str(Path.cwd())]))
    if len(specs) == len(parts) and specs[-1].has_location:
        return specs[-1].origin
    return None


def _digest(path: str | None) -> str | None:
    """Return the SHA-256 of a file; None without a file, as for modules of a library."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None
    except OSError:
        return None
