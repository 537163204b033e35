"""Changes of files on ranks other than 0, made in a private folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from samestep.script.file_journal import (
    READING,
    REAL,
    UNNAMED,
    WRITING,
    How,
    begins_again,
    copy_file,
    key_of,
    noted_file,
    open_function,
)
from samestep.script.file_view import MISSING, FileView, Place
from samestep.script.patches import PATHS, database_path

# Functions whose replacement is the method of the same name.
_OWN = (
    "descriptor listdir scandir getcwd chdir mkdir makedirs symlink link remove rmdir truncate "
    "replace"
)
_QUERIES = ("stat", "statvfs", "lstat", "access", "readlink", "listxattr", "getxattr")
_ATTRIBUTES = ("utime", "chmod", "chown", "lchown", "setxattr", "removexattr")


def _error(number: int, *paths: Any) -> OSError:
    return OSError(number, os.strerror(number), *paths)


class Overlay(FileView):
    """View of files, and replacements of the functions that change files.

    A method with the name of a function of `os` replaces this function.
    """

    def replacements(self) -> list[tuple[Any, Any]]:
        pairs = [(getattr(REAL, name), getattr(self, name)) for name in _OWN.split()]
        pairs += [(getattr(REAL, n), self.query(n)) for n in _QUERIES if hasattr(REAL, n)]
        pairs += [(getattr(REAL, n), self._attribute(n)) for n in _ATTRIBUTES if hasattr(REAL, n)]
        return [
            *pairs,
            (REAL.unlink, self.remove),
            (REAL.rename, self.replace),
            (REAL.mkstemp, self._exempt.mkstemp),
            (REAL.mkdtemp, self._exempt.mkdtemp),
            (REAL.open, open_function(self.open, lambda: self._is_active)),
            (REAL.connect, self.connect),
        ]

    def _target(self, path: Any, *, follow: bool = False) -> Place | None:
        """Return the place of a change; None if it is made in the real file system."""
        if not self._is_active or not isinstance(path, PATHS):
            return None
        place = self._place(path, follow=follow)
        if self._exempt.covers("/".join(place)):
            return None
        return place

    def _state(self, place: Place, *, waits: bool = True) -> os.stat_result | None:
        try:
            path = "/".join(place) or "/"
            state: os.stat_result = self._query(path, REAL.lstat, follow=False, waits=waits)
        except MISSING:
            return None
        return state

    def _private(self, place: Place) -> str:
        # Under the same path as in the real file system: no table of names is needed.
        self._exempt.passing(REAL.makedirs, f"{self._root}{place[0]}", exist_ok=True)
        return f"{self._root}{place[0]}/{place[1]}"

    def _set(self, place: Place, path: str, *, is_dropped: bool = False, token: Any = None) -> None:
        self._changes.append(*place, path, is_dropped, token, path != "" and os.path.islink(path))
        self._changes.update(self._note_own)

    def _require_new(self, place: Place, *paths: Any) -> None:
        """Require that a path does not exist, and that its folder does.

        A path that rank 0 made in this run may exist.
        """
        state = self._state(place, waits=False)
        if state is not None and (self._find(place) or "/".join(place) not in self._made):
            raise _error(errno.EEXIST, *paths)
        self._require_folder(place, *paths)

    def _require_folder(self, place: Place, *paths: Any) -> None:
        state = self._state(self._place(place[0] or "/", follow=True))
        if state is None or not stat.S_ISDIR(state.st_mode):
            code = errno.ENOENT if state is None else errno.ENOTDIR
            raise _error(code, *paths)

    # --- content ---

    def _opened(
        self, path: Any, *, copies: bool, creates: bool = True, is_new: bool = False, most: float
    ) -> str:
        """Prepare the private file for a path that is opened for writing; "" for the real file.

        Args:
            path: any path.
            copies: the content remains.
            creates: the file need not exist.
            is_new: the file must not exist.
            most: content of larger files is not copied, because it is not read through the same
                descriptor.
        """
        place = self._target(path, follow=not is_new)
        if place is None:
            return ""
        with self._preparing:
            return self._prepared(path, place, copies, creates, is_new, most)

    def _prepared(
        self, path: Any, place: Place, copies: bool, creates: bool, is_new: bool, most: float
    ) -> str:
        state = self._state(place, waits=copies or not creates)
        if is_new:
            self._require_new(place, path)
        elif state is None and creates:
            self._require_folder(place, path)
        elif state is None:
            raise _error(errno.ENOENT, path)
        elif stat.S_ISDIR(state.st_mode):
            raise _error(errno.EISDIR, path)
        elif not stat.S_ISREG(state.st_mode):
            return ""  # a pipe or a device
        target = self._private(place)
        is_large = state is not None and state.st_size > most

        def copy(actual: Any) -> bool:
            if actual == target and (actual not in self._dropped or is_large):
                return actual in self._dropped
            source = actual if is_large else self._content(path, actual)
            return not copy_file(source, target, most)

        is_lost = copies and not is_new and state is not None and self._query("/".join(place), copy)
        if is_lost or self._find(place) != target or target in self._dropped:
            self._set(place, target, is_dropped=is_lost)
        return target

    def _written(self, target: str) -> None:
        """Drop the content of a private file that was closed, if it is large.

        The file was written from its beginning, and is not mapped into memory.
        """
        path = target.removeprefix(self._root)
        token = self._closed(path)
        with suppress(FileNotFoundError):  # removed or renamed before it was closed
            size = REAL.stat(target).st_size
            if size <= self._keep_bytes or not self._is_active:
                return
            # The size remains, without blocks: each rank would otherwise need the space of the
            # checkpoints of rank 0.
            REAL.truncate(target, 0)
            REAL.truncate(target, size)
            folder, _, name = path.rpartition("/")
            self._set((folder, name), target, is_dropped=True, token=token)

    def _closed(self, path: str) -> tuple[str, int]:
        key = key_of(path)
        self._own_closes[key] += 1
        return path, self._own_closes[key]

    def open(self, file: Any, how: How) -> Any:
        mode = how[0]
        if mode in READING:

            def read(target: Any) -> Any:
                if target is file:
                    return REAL.open(file, *how)
                return noted_file(file, self._content(file, target), how)

            return self._query(file, read)
        most = float("inf") if "+" in mode else self._keep_bytes
        copies = bool(set("ar") & set(mode))
        target = self._opened(
            file, copies=copies, creates="r" not in mode, is_new="x" in mode, most=most
        )
        if not target:
            return REAL.open(file, *how)
        on_close = None
        if begins_again(mode):
            on_close = partial(self._written, target)
        return noted_file(file, target, how, on_close)

    def descriptor(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if not flags & WRITING or flags & UNNAMED == UNNAMED:

            def read(target: Any) -> Any:
                if target:
                    target = self._content(path, target)
                return REAL.descriptor(target, flags, mode)

            return int(self._query(path, read))
        most = float("inf") if flags & os.O_RDWR else self._keep_bytes
        target = self._opened(
            path,
            copies=not flags & os.O_TRUNC,
            creates=bool(flags & os.O_CREAT),
            is_new=bool(flags & os.O_CREAT and flags & os.O_EXCL),
            most=most,
        )
        return int(REAL.descriptor(target or path, flags, mode))

    def read_in_cpp(self, path: Any, read: Callable[[Any], Any]) -> Any:
        try:
            # Another file can be at the path later.
            descriptor = self.descriptor(path, os.O_RDONLY)
        except MISSING:
            return read(path)  # perhaps a URL
        try:
            return self._exempt.passing(read, f"/dev/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def write_in_cpp(self, path: Any, write: Callable[[Any], Any]) -> Any:
        target = self._opened(path, copies=False, most=0)
        if not target:
            return write(path)
        result = write(target)
        self._written(target)
        return result

    def connect(self, *arguments: Any, **options: Any) -> Any:
        path, put = database_path(arguments, options)
        if path is not None and (target := self._opened(path, copies=True, most=float("inf"))):
            arguments, options = put(target)
        return REAL.connect(*arguments, **options)

    def truncate(self, path: Any, length: int) -> None:
        target = ""
        if not isinstance(path, int):
            target = self._opened(path, copies=True, creates=False, most=float("inf"))
        REAL.truncate(target or path, length)

    # --- names ---

    def makedirs(self, *arguments: Any, **options: Any) -> None:
        """Replace `os.makedirs`: that a folder does not exist is no reason to wait."""
        self._exempt.local.is_quiet = True
        try:
            REAL.makedirs(*arguments, **options)
        finally:
            self._exempt.local.is_quiet = False

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        place = self._target(path)
        if place is None:
            REAL.mkdir(path, mode)
            return
        self._require_new(place, path)
        target = self._private(place)
        # The private folder exists already if another change is below.
        self._exempt.passing(REAL.makedirs, target, exist_ok=True)
        self._set(place, target)

    def symlink(self, source: Any, path: Any, target_is_directory: bool = False) -> None:
        place = self._target(path)
        if place is None:
            REAL.symlink(source, path)
            return
        self._require_new(place, source, None, path)
        target = self._private(place)
        REAL.symlink(source, target)
        self._set(place, target)
        # Known folders can lead through the link now.
        self._folders.clear()

    def link(self, source: Any, path: Any, **options: Any) -> None:
        """Replace `os.link` by a copy."""
        place = self._target(path)
        actual = self.located(source)
        if place is None:
            REAL.link(actual, path, **options)
            return
        self._require_new(place, path)
        target = self._private(place)
        # A link would show later changes of rank 0.
        is_lost = not copy_file(actual, target, self._keep_bytes) or actual in self._dropped
        self._set(place, target, is_dropped=is_lost, token=self._dropped.get(actual))

    def remove(self, path: Any) -> None:
        self._remove(path, is_folder=False)

    def rmdir(self, path: Any) -> None:
        self._remove(path, is_folder=True)

    def _remove(self, path: Any, *, is_folder: bool) -> None:
        real = REAL.unlink
        if is_folder:
            real = REAL.rmdir
        place = self._target(path)
        if place is None:
            real(path)
            return
        state = self._state(place)
        actual = self._find(place)
        # Rank 0 may have removed it, before it was ready, in the same call of the script.
        if state is None and (actual is not None or "/".join(place) not in self._removed):
            raise _error(errno.ENOENT, path)
        if state is not None and stat.S_ISDIR(state.st_mode) != is_folder:
            code = errno.ENOTDIR if is_folder else errno.EISDIR
            raise _error(code, path)
        if is_folder and state is not None and self.listdir("/".join(place)):
            raise _error(errno.ENOTEMPTY, path)
        if is_folder or (actual and self._is_own(actual)):
            with suppress(FileNotFoundError):
                real(f"{self._root}{place[0]}/{place[1]}")
        self._set(place, "")
        self._folders.clear()

    def replace(self, source: Any, path: Any) -> None:
        """Replace `os.replace` and `os.rename`."""
        place = self._target(path)
        if place is None and self._target(source) is None:
            REAL.replace(source, path)
            return
        old = self._place(source, follow=False)
        start = "/".join(old)
        state = self._state(old)
        if state is None and self._find(old) is None and start in self._removed:
            return  # rank 0 has renamed it
        if state is None:
            raise _error(errno.ENOENT, source, None, path)
        place = place or self._place(path, follow=False)
        new = "/".join(place)
        if place == old:
            return
        is_folder = stat.S_ISDIR(state.st_mode)
        if is_folder and new.startswith(f"{start}/"):
            raise _error(errno.EINVAL, source, None, path)
        existing = self._state(place)
        if existing is None:
            self._require_folder(place, source, None, path)
        elif stat.S_ISDIR(existing.st_mode) != is_folder:
            code = errno.ENOTDIR if is_folder else errno.EISDIR
            raise _error(code, source, None, path)
        elif is_folder or stat.S_ISLNK(state.st_mode):
            self._remove(path, is_folder=is_folder)
        if is_folder:
            # Each entry by itself: a part of them may be here, another one in the real file system.
            self.mkdir(new)
            for name in self.listdir(start):
                self.replace(f"{start}/{name}", f"{new}/{name}")
        elif stat.S_ISLNK(state.st_mode):
            self.symlink(self._query(start, REAL.readlink, follow=False), new)
        else:
            self._move(start, new)
        self._forget(start)
        self._folders.clear()

    def _move(self, source: str, path: str) -> None:
        place = self._place(path, follow=False)
        is_real = self._exempt.covers(path)
        target = path if is_real else self._private(place)

        def copy(actual: Any) -> tuple[str, bool]:
            is_dropped = actual in self._dropped
            if not self._is_own(actual):
                # Rank 0 alone moves real files.
                is_dropped = not copy_file(actual, target, self._keep_bytes) or is_dropped
            return actual, is_dropped

        actual, is_dropped = self._query(source, copy, follow=False)
        token = self._dropped.get(actual)
        if self._is_own(actual):
            REAL.replace(actual, target)
        if self._exempt.covers(source):
            token = self._closed(path)
        if not is_real:
            self._set(place, target, is_dropped=is_dropped, token=token)

    def _forget(self, path: str) -> None:
        place = self._place(path, follow=False)
        is_real = self._exempt.covers(path)
        left = path if is_real else f"{self._root}{path}"
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(REAL.lstat(left).st_mode):
                REAL.rmdir(left)
            else:
                REAL.unlink(left)
        if not is_real:
            self._set(place, "")

    def _attribute(self, name: str) -> Callable[..., None]:
        """Return the replacement of a function of `os` that changes an attribute of own files."""
        real = getattr(REAL, name)

        def call(path: Any, *arguments: Any, **options: Any) -> None:
            follow = name != "lchown" and options.get("follow_symlinks", True)
            if self._target(path, follow=follow) is None:
                real(path, *arguments, **options)
                return
            actual = self._query(path, lambda target: REAL.lstat(target) and target, follow=follow)
            # Other files are those of the real file system, which rank 0 alone changes.
            if isinstance(actual, str) and self._is_own(actual):
                real(actual, *arguments, **options)

        return call
