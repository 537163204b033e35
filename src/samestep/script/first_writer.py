"""One writer of files for unchanged scripts: rank 0. Every rank reads what it has written."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samestep.distributed.status import RankStatus
from samestep.script.file_journal import (
    READING,
    REAL,
    UNNAMED,
    WRITING,
    Exchanges,
    Exemptions,
    How,
    Journal,
    begins_again,
    copy_file,
    listing_of,
    noted_file,
    open_function,
)
from samestep.script.patches import PATHS, Replaced, database_path
from samestep.script.private_writes import Overlay

KEEP_BYTES = 64 * 2**20
_MAX_HELD = 256  # large files; a process has 1,024 descriptors
_COPIES = 16  # total size of kept copies, in multiples of the limit of one


@contextmanager
def one_writer(
    rank: int, size: int, folder: str | Path, status: RankStatus, *, keep_bytes: int = KEEP_BYTES
) -> Iterator[FirstWriter | Overlay]:
    """Let rank 0 alone write files inside the block, while other ranks see their own changes.

    Rank 0 is first until its first exchange: another rank waits where a path does not exist, or is
    changed by rank 0. From then on a rank sees what rank 0 had made by then, and its own changes,
    but no later changes of rank 0.

    Args:
        rank: rank of this process.
        size: number of ranks.
        folder: existing temporary folder of the launch, the same on all ranks, empty at first.
        status: status of this rank.
        keep_bytes: other ranks read larger files that they have written from rank 0.

    Yields:
        `exchange()` for the beginning of each exchange with other ranks.
    """
    place = os.path.realpath(folder)
    writer: FirstWriter | Overlay
    if rank == 0:
        writer = FirstWriter(place, keep_bytes)
    else:
        writer = Overlay(rank, place, status, keep_bytes)
    replaced = Replaced(writer) if size > 1 else None
    try:
        yield writer
    finally:
        writer.close()
        if replaced is not None:
            replaced.undo()
        if rank:
            shutil.rmtree(f"{place}/rank-{rank}", ignore_errors=True)  # threads may write still


class FirstWriter:
    """Replacements of functions of files on rank 0.

    Rank 0 works on the real file system and notes its changes in a journal.

    Lines of the journal: `made PATH`, `changed PATH`, `removed PATH`, each before the operation,
    with the path of a copy of what was there when rank 0 was ready ("" for nothing) and whether the
    copy lacks the content; `closed PATH` after a complete file; `moved PATH PATH` when its content
    can be read elsewhere ("" for nowhere), before it can no longer be read at the first path;
    `listed FOLDER LINE` before a listing, until rank 0 is ready; `ready` and `end`.

    Rank 0 waits for no other rank. A large file that it changes or removes stays open, so that its
    content can be read through `/proc`, until the other ranks have passed the point at which it was
    changed.
    """

    def __init__(self, folder: str, keep_bytes: int) -> None:
        self._folder = folder
        self._keep_bytes = keep_bytes
        self._copied_bytes = 0
        self._copies = 0
        self._exempt = Exemptions(folder)
        self._journal = Journal(f"{folder}/journal")
        self._exchanges = Exchanges(f"{folder}/exchanges")
        self._large: set[str] = set()  # large files that were written, and not changed since
        # Descriptors of such files that were changed since the last exchange, and the one before.
        self._held: list[int] = []
        self._passed: list[int] = []
        self._changed: set[str] = set()  # since rank 0 is ready
        self._opened: set[str] = set()  # for writing, at any time
        self._is_ready = False
        self._is_active = True

    def mark_ready(self) -> None:
        """Note that preparations are complete; later calls do nothing."""
        if not self._is_ready:
            self._changed.clear()
            self._is_ready = True
            self._journal.append("ready")

    def exchange(self) -> None:
        """Note the beginning of an exchange: the other ranks have reached the one before it."""
        self.mark_ready()
        for descriptor in self._passed:
            self._release(descriptor)
        self._passed = self._held
        self._held = []
        self._exchanges.advance()

    def has_passed(self) -> bool:
        """Whether rank 0 is at a later point of the script than this rank."""
        return False

    def close(self) -> None:
        """End the journal; replacements that are still held call the functions of the system."""
        self.mark_ready()
        self._is_active = False
        self._journal.append("end")

    def replacements(self) -> list[tuple[Any, Any]]:
        return [
            (REAL.open, open_function(self.open, lambda: self._is_active)),
            (REAL.descriptor, self.descriptor),
            (REAL.truncate, self.truncate),
            *((real, self._listing(real)) for real in (REAL.listdir, REAL.scandir)),
            (REAL.mkdir, self._creation(REAL.mkdir, 0)),
            *((real, self._creation(real, 1)) for real in (REAL.symlink, REAL.link)),
            *((real, self._removal(real)) for real in (REAL.remove, REAL.unlink, REAL.rmdir)),
            *((real, self._renaming(real)) for real in (REAL.rename, REAL.replace)),
            (REAL.mkstemp, self._exempt.mkstemp),
            (REAL.mkdtemp, self._exempt.mkdtemp),
            (REAL.connect, self.connect),
        ]

    # --- journal ---

    def _change(
        self,
        path: Any,
        *,
        follow: bool = True,
        truncates: bool = False,
        removes: bool = False,
        replaces: bool = False,
    ) -> str:
        """Note a change of a path that follows.

        Args:
            path: any path.
            follow: a link is followed.
            truncates: a regular file is written from its beginning.
            removes: the path is removed.
            replaces: no path leads to the old file any more, so that its content does not change.

        Returns:
            The path without links, or "" if it need not be noted.
        """
        if not self._is_active or not isinstance(path, PATHS):
            return ""
        name = self._name(path, follow=follow)
        state = self._state(name)
        if self._exempt.covers(name) or (state is None and removes):
            return ""
        kind = stat.S_IFREG
        if state is not None:
            kind = stat.S_IFMT(state.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            return ""
        is_fresh = truncates and state is not None and self._can_begin_again(name, state)
        if name in self._large:
            self._hold(name, is_in_place=not (is_fresh or replaces))
        copy = ""
        is_lost = False
        if state is not None and self._is_ready and name not in self._changed:
            copy, is_lost = self._keep(name, state, is_unchanged=is_fresh or replaces)
        operation = "changed"
        if removes:
            operation = "removed"
        elif state is None:
            operation = "made"
        # A further change is no news: other ranks read the first copy.
        if operation != "changed" or name not in self._changed:
            self._journal.append(operation, name, copy, is_lost)
        self._changed.add(name)
        if is_fresh and state is not None:
            # In place of a truncation: readers that have opened the old file keep its content.
            new = f"{name}.{os.getpid()}"
            mode = stat.S_IMODE(state.st_mode)
            self._journal.append("made", new, "", False)
            os.close(REAL.descriptor(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            # The umask has reduced the mode.
            REAL.chmod(new, mode)
            REAL.replace(new, name)
        self._opened.add(name)
        return name

    def _name(self, path: Any, *, follow: bool) -> str:
        text = os.fsdecode(path)
        if follow:
            return os.path.realpath(text)
        head, tail = os.path.split(os.path.abspath(text))
        return os.path.join(os.path.realpath(head), tail)

    def _state(self, name: str) -> os.stat_result | None:
        try:
            state: os.stat_result = REAL.lstat(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return state

    def _can_begin_again(self, name: str, state: os.stat_result) -> bool:
        """Whether a new file can take the place of an old one, which no other object writes."""
        # Another link would keep the old content, and another owner would change.
        is_own = state.st_nlink == 1 and state.st_uid == os.geteuid()
        is_plain = stat.S_ISREG(state.st_mode) and is_own
        is_free = name in self._large or (self._is_ready and name not in self._opened)
        return is_plain and is_free and os.access(os.path.dirname(name), os.W_OK)

    def _keep(self, name: str, state: os.stat_result, *, is_unchanged: bool) -> tuple[str, bool]:
        """Keep what is at a path for other ranks.

        Returns:
            The path of the copy, and whether it lacks the content.
        """
        self._copies += 1
        copy = f"{self._folder}/before-{os.getpid()}-{self._copies}"
        if stat.S_ISDIR(state.st_mode):
            REAL.mkdir(copy)
            return copy, False
        if stat.S_ISLNK(state.st_mode):
            REAL.symlink(REAL.readlink(name), copy)
            return copy, False
        if is_unchanged and state.st_nlink == 1:
            # Costs no space, although the file may be large.
            with suppress(OSError):  # another file system
                REAL.link(name, copy)
                return copy, False
        most = self._keep_bytes
        if self._copied_bytes + state.st_size > _COPIES * most:
            most = -1  # nothing more: the folder must not fill the disk
        is_copied = copy_file(name, copy, most)
        self._copied_bytes += state.st_size * is_copied
        return copy, not is_copied

    def _closed(self, name: str) -> None:
        if not self._is_active:
            return
        with suppress(FileNotFoundError):
            if REAL.stat(name).st_size > self._keep_bytes:
                self._large.add(name)
        self._journal.append("closed", name)

    def _hold(self, name: str, *, is_in_place: bool = False) -> str:
        """Keep a large file, which is changed now, open for ranks that have not read it yet.

        Args:
            name: path of the file.
            is_in_place: the file itself is changed, so that a copy of it is needed.

        Returns:
            Where to read it.
        """
        self._large.remove(name)
        location = ""
        with suppress(OSError):  # then a rank that reads the file has an error
            if is_in_place:
                copy = f"{self._folder}/held"
                copy_file(name, copy, float("inf"))
                self._held.append(REAL.descriptor(copy, os.O_RDONLY))
                # Without a name, the copy ends with the descriptor.
                REAL.unlink(copy)
            else:
                self._held.append(REAL.descriptor(name, os.O_RDONLY))
            location = _through(self._held[-1])
            if len(self._held) > _MAX_HELD:
                self._release(self._held.pop(0))
        self._journal.append("moved", name, location)
        return location

    def _release(self, descriptor: int) -> None:
        self._journal.append("moved", _through(descriptor), "")
        os.close(descriptor)

    # --- replacements ---

    def open(self, file: Any, how: How) -> Any:
        name = ""
        if how[0] not in READING:
            name = self._change(file, truncates="w" in how[0])
        if not name or not begins_again(how[0]):
            return REAL.open(file, *how)
        return noted_file(file, file, how, lambda: self._closed(name))

    def descriptor(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & WRITING and flags & UNNAMED != UNNAMED:
            self._change(path, truncates=bool(flags & os.O_TRUNC))
        return int(REAL.descriptor(path, flags, *arguments, **options))

    def truncate(self, path: Any, length: int) -> None:
        self._change(path)
        REAL.truncate(path, length)

    def connect(self, *arguments: Any, **options: Any) -> Any:
        path, _ = database_path(arguments, options)
        self._change(path)
        return REAL.connect(*arguments, **options)

    def _listing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".") -> Any:
            path = "." if path is None else path
            if not self._is_ready and isinstance(path, PATHS) and not self._exempt.local.depth:
                self._journal.append("listed", listing_of(self._name(path, follow=True)))
            return real(path)

        return call

    def _creation(self, real: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path: Any = options.get("path", options.get("dst"))
            if position < len(arguments):
                path = arguments[position]
            if self._is_active and not os.path.lexists(path):
                self._change(path, follow=False)
            return real(*arguments, **options)

        return call

    def _removal(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, **options: Any) -> Any:
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            # Otherwise the call fails, and changes nothing.
            if is_folder == (real is REAL.rmdir):
                self._change(path, follow=False, removes=True, replaces=True)
            return real(path, **options)

        return call

    def _renaming(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(src: Any, dst: Any, **options: Any) -> Any:
            moves: list[tuple[str, str | None]] = []
            if self._is_active and os.path.lexists(src):
                old = self._name(src, follow=False)
                moves = self._note_move(old, self._name(dst, follow=False))
            result = real(src, dst, **options)
            for path, location in moves:
                if location is None:
                    self._closed(path)
                elif location:
                    self._journal.append("moved", location, path)
                    self._large.add(path)
            return result

        return call

    def _note_move(self, source: str, path: str) -> list[tuple[str, str | None]]:
        """Note a move that follows.

        Returns:
            New path of each large file, and where it can be read meanwhile; None for a file that
            each rank had for itself.
        """
        if source == path:
            return []
        paths = [source]
        if os.path.isdir(source) and not os.path.islink(source):
            for folder, folders, files in os.walk(source):
                paths += [f"{folder}/{name}" for name in (*folders, *files)]
        moves: list[tuple[str, str | None]] = []
        for each in paths:
            new = path + each.removeprefix(source)
            if self._change(new, follow=False, replaces=True):
                if self._exempt.covers(each):
                    moves.append((new, None))
                elif each in self._large:
                    moves.append((new, self._hold(each)))
        for each in paths:
            self._change(each, follow=False, removes=True)
        return moves

    def read_in_cpp(self, path: Any, read: Callable[[Any], Any]) -> Any:
        return self._exempt.passing(read, path)

    def write_in_cpp(self, path: Any, write: Callable[[Any], Any]) -> Any:
        name = self._change(path, truncates=True)
        result = self._exempt.passing(write, path)
        if name:
            self._closed(name)
        return result


def _through(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
