"""View of files on ranks other than 0: own changes over the files before rank 0 changed them."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from samestep.distributed.collective_check import script_line
from samestep.distributed.status import RankStatus
from samestep.errors import RunError
from samestep.script.file_journal import (
    REAL,
    Entries,
    Entry,
    Exchanges,
    Exemptions,
    Journal,
    ThreadLock,
    key_of,
    listing_of,
)
from samestep.script.patches import PATHS

_POLL_SECONDS = 0.01
_MAX_LINKS = 40  # as Linux
MISSING = (FileNotFoundError, NotADirectoryError)
Place = tuple[str, str]  # folder without links, and name
Token = tuple[str, int]  # path, and which of the closes of files with its key


class FileView:
    """What one rank, and the processes that it forks, see of files.

    A change is made below a private folder, under the same path, and noted. Other paths are read
    from the real file system; a path that rank 0 has changed since it was ready is read from the
    copy that rank 0 has kept, or is absent.

    Args:
        rank: 1 or higher.
        folder: folder of the launch, without links.
        status: status of this rank.
        keep_bytes: content of larger written files is not kept.
    """

    def __init__(self, rank: int, folder: str, status: RankStatus, keep_bytes: int) -> None:
        self._root = f"{folder}/rank-{rank}"
        REAL.mkdir(self._root)
        self._first = Journal(f"{folder}/journal")
        self._changes = Journal(f"{self._root}.changes")
        self._preparing = ThreadLock()  # of private files
        self._exchanges = Exchanges(f"{folder}/exchanges")
        self._own_exchanges = Exchanges(f"{self._root}.exchanges")
        self._exempt = Exemptions(folder)
        self._status = status
        self._keep_bytes = keep_bytes
        self._process = os.getpid()
        self._is_active = True
        self._is_ready = False
        self._has_ended = False  # rank 0
        # Folder and name to the private path, "" if removed; and to the copy of rank 0, "" if there
        # was none.
        self._own: dict[str, dict[str, str]] = defaultdict(dict)
        self._before: dict[str, dict[str, str]] = defaultdict(dict)
        # By rank 0 before it was ready. The values of `_made` are numbers, those of `_listings` the
        # length of `_made` at each.
        self._touched: set[str] = set()
        self._removed: set[str] = set()
        self._made: dict[str, int] = {}
        self._listings: dict[str, list[int]] = defaultdict(list)
        self._own_listings: Counter[str] = Counter()
        # Paths of files without their content, and where it is.
        self._dropped: dict[str, Token | None] = {}
        # Of rank 0, by key: path of each file, and where its content is now; and the same lists of
        # one path by this path, [""] if overwritten.
        self._closes: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
        self._contents: dict[str, list[str]] = {}
        self._own_closes: Counter[str] = Counter()
        self._folders: dict[str, str] = {}  # folders as they are written, and without links
        self._directory: str = REAL.getcwd()
        self._is_moved = False  # the working directory is private
        self._has_links = False  # which are not in the real file system

    def exchange(self) -> None:
        """Note the beginning of an exchange with the other ranks."""
        self._own_exchanges.advance()

    def has_passed(self) -> bool:
        """Whether rank 0 is at a later point, where it waits for this rank or has ended.

        What it did before is noted then.
        """
        is_passed = self._exchanges.read() > self._own_exchanges.read()
        self._update()
        return is_passed or self._has_ended

    def close(self) -> None:
        """End the view; replacements that are still held call the functions of the system."""
        self._is_active = False
        if self._is_moved:
            with suppress(FileNotFoundError):
                REAL.chdir(self._directory)

    # --- places ---

    def _find(self, place: Place) -> str | None:
        """Return the path at which this rank sees a place: None for the real one, "" for none."""
        folder, name = place
        path = self._own.get(folder, {}).get(name)
        if path is None:
            path = self._before.get(folder, {}).get(name)
        return path

    def _place(self, path: Any, *, follow: bool) -> Place:
        text: str = path if type(path) is str else os.fsdecode(path)
        if text[:1] != "/":
            text = f"{self._directory}/{text}"
        head, _, name = text.rpartition("/")
        if name in ("", ".", ".."):
            head, _, name = self._folder(text).rpartition("/")
            return head, name
        folder = self._folders.get(head)
        place = (self._folder(head) if folder is None else folder, name)
        if follow:
            return self._followed(place)
        return place

    def _folder(self, path: str) -> str:
        """Return a folder without links and dots; "" for the root."""
        known = self._folders.get(path)
        if known is None:
            head, _, name = path.rpartition("/")
            parent = self._folder(head) if path else ""
            if name in ("", "."):
                known = parent
            elif name == "..":
                known = parent.rpartition("/")[0]
            else:
                known = "/".join(self._followed((parent, name)))
                if self._first.has_grown():  # perhaps by a link
                    self._update()
                    known = "/".join(self._followed((parent, name)))
            self._folders[path] = known
        return known

    def _followed(self, place: Place) -> Place:
        for _ in range(_MAX_LINKS):
            path = self._find(place)
            try:
                path = "/".join(place) if path is None else path
                if not stat.S_ISLNK(REAL.lstat(path).st_mode):
                    return place
                target = REAL.readlink(path)
            except OSError:
                return place
            if target[:1] != "/":
                target = f"{place[0]}/{target}"
            place = self._place(target, follow=False)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), "/".join(place))

    def _is_own(self, path: str) -> bool:
        return path.startswith(self._root)

    # --- queries ---

    def _query(
        self,
        path: Any,
        call: Callable[[Any], Any],
        *,
        follow: bool = True,
        waits: bool = True,
        is_listed: Callable[[], bool] | None = None,
    ) -> Any:
        """Call a function with the path at which this rank sees `path`.

        It is called again until rank 0 changes nothing meanwhile. With `waits`, a call whose result
        rank 0 may change waits until it is ready, or has listed a folder as often (`is_listed`).
        """
        if not isinstance(path, PATHS) or not self._is_active or self._exempt.local.depth:
            return call(path)
        is_prepared = is_listed or (lambda: self._is_ready)
        while True:
            was_prepared = is_prepared()
            place = self._place(path, follow=follow)
            actual = self._find(place)
            target: Any = actual
            if actual is None and (self._is_moved or self._has_links):
                target = "/".join(place) or "/"
            elif actual is None:
                target = path  # unchanged: errors and entries have this path
            location = self._location(actual) if actual else ""
            result: Any = None
            failure: OSError | None = None
            try:
                result = call(target)
            except OSError as error:
                failure = error
            is_settled = True
            if self._first.has_grown() or self._changes.has_grown():
                self._update()
                is_same = self._place(path, follow=follow) == place and self._find(place) == actual
                is_settled = is_same and (not actual or self._location(actual) == location)
            if is_settled and not was_prepared and waits and actual is None:
                # Rank 0, which is not ready, changes the path now, or may create it.
                name = "/".join(place)
                is_missing = isinstance(failure, MISSING) or result is False
                may_appear = (
                    is_missing or is_listed is not None
                ) and not self._exempt.local.is_quiet
                if name in self._touched or (may_appear and not self._exempt.is_foreign(name)):
                    self._wait(is_prepared, "the preparation by rank 0", is_preparation=True)
                is_settled = not is_prepared()
            if is_settled:
                if failure is None:
                    return result
                failure.filename = path
                raise failure
            if hasattr(result, "close"):
                result.close()  # perhaps of a file that rank 0 has changed meanwhile

    def _wait(
        self, is_over: Callable[[], bool], name: str, *, is_preparation: bool = False
    ) -> None:
        # A forked process must not write into the rank's status.
        is_rank = os.getpid() == self._process
        with self._status.waiting(name) if is_rank else nullcontext():
            while not is_over() and self._is_active:
                time.sleep(_POLL_SECONDS)
                if is_preparation and is_rank:
                    self._status.heartbeat()  # a preparation takes any time
                self._update()

    def _update(self) -> None:
        self._first.update(self._note_first)
        self._changes.update(self._note_own)

    def _note_first(
        self, operation: str, path: str = "", other: str = "", is_lost: bool = False
    ) -> None:
        """Note a line of rank 0's journal; see `FirstWriter`."""
        if operation in ("ready", "end"):
            self._touched.clear()
            self._folders.clear()
            self._is_ready = True
            self._has_ended = operation == "end"
        elif operation == "closed":
            self._note_location(path, "")
            self._contents[path] = [path]
            self._closes[key_of(path)].append((path, self._contents[path]))
        elif operation == "moved":
            self._note_location(path, other)
        elif operation == "listed":
            self._listings[path].append(len(self._made))
        else:
            self._note_location(path, "")
            if not self._is_ready:
                self._touched.add(path)
                if operation == "made":
                    self._made.setdefault(path, len(self._made))
                elif operation == "removed":
                    self._removed.add(path)
                return
            folder, _, name = path.rpartition("/")
            # The first change only: a copy is of the time when rank 0 was ready.
            self._before[folder].setdefault(name, other)
            if other and stat.S_ISLNK(REAL.lstat(other).st_mode):
                self._has_links = True
            if is_lost:
                self._dropped.setdefault(other, None)

    def _note_location(self, path: str, location: str) -> None:
        """Note that the content at a path of rank 0 is elsewhere now; "" for nowhere."""
        content = self._contents.pop(path, None)
        if content is not None:
            content[0] = location
            if location:
                self._contents[location] = content

    def _note_own(
        self,
        folder: str,
        name: str,
        path: str,
        is_dropped: bool,
        token: Token | None,
        is_link: bool,
    ) -> None:
        self._own[folder][name] = path
        self._has_links = self._has_links or is_link
        self._dropped.pop(path, None)
        if is_dropped:
            self._dropped[path] = token

    def _location(self, actual: str) -> str:
        """Return where rank 0 has the content that this rank has not kept, or "" for nowhere."""
        path, number = self._dropped.get(actual) or ("", 1)
        closes = self._closes[key_of(path)]
        if len(closes) < number:
            return ""
        name, content = closes[number - 1]
        # Threads of rank 0 may have written the files in another order.
        is_other = name != path and any(other == path for other, _ in closes)
        if is_other:
            return ""
        return content[0]

    def _content(self, path: Any, actual: str) -> str:
        """Return where the content of a file is: at rank 0 if this rank has not kept it."""
        if actual not in self._dropped:
            return actual
        if (token := self._dropped[actual]) is not None:
            own_path, number = token
            closes = self._closes[key_of(own_path)]

            def is_over() -> bool:
                is_passed = self.has_passed()  # which reads the journal
                is_written = len(closes) >= number and closes[number - 1][0] == own_path
                return is_passed or is_written

            self._wait(is_over, f"{path} from rank 0")
            if location := self._location(actual):
                return location
        file, line = script_line(sys._getframe())
        raise RunError(
            f"{file}:{line}: {os.fsdecode(path)} is read, but its content is gone or was never "
            "written by rank 0",
            expected=f"a file above {self._keep_bytes} bytes that rank 0 writes too, under this "
            "path but for digits",
            fix="choose paths that are equal on all processes, without random text",
            code="E_SCRIPT_FILES",
        )

    def query(self, name: str) -> Callable[..., Any]:
        """Return the replacement of a function of `os` that takes a path and changes nothing."""
        real = getattr(REAL, name)
        is_of_link = name in ("lstat", "readlink")

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if type(path) is str and path.startswith(self._root):  # argument of a function in C++
                return real(path, *arguments, **options)
            follow = not is_of_link and options.get("follow_symlinks", True)
            return self._query(
                path, lambda target: real(target, *arguments, **options), follow=follow
            )

        return call

    def located(self, path: Any) -> Any:
        """Return the path at which this rank sees an existing file."""
        return self._query(path, lambda target: REAL.stat(target) and target)

    def getcwd(self) -> str:
        folder: str = self._directory if self._is_active else REAL.getcwd()
        return folder

    def chdir(self, path: Any) -> None:
        self._query(path, REAL.chdir)
        if self._is_active:
            folder = REAL.getcwd()
            self._is_moved = self._is_own(folder)
            self._directory = folder.removeprefix(self._root)

    def listdir(self, path: Any = ".") -> list[Any]:
        if isinstance(path, int) or not self._is_active:
            return list(REAL.listdir(path))
        return [entry.name for entry in self.scandir(path)]

    def scandir(self, path: Any = ".") -> Any:
        path = "." if path is None else path
        if isinstance(path, int) or not self._is_active:
            return REAL.scandir(path)
        folder = "/".join(self._place(path, follow=True)) or "/"

        def read(target: Any) -> Any:
            is_real = target is path or target == folder
            if not is_real and not stat.S_ISDIR(REAL.stat(target).st_mode):
                return REAL.scandir(target)  # raises the error
            try:
                real = path if target is path else folder
                with REAL.scandir(real) as entries:
                    return {os.fsdecode(entry.name): entry for entry in entries}
            except MISSING:
                if is_real:
                    raise
                return {}  # what is in a private folder is in `_own`

        # A listing of rank 0 does not contain what it made later, nor does the same listing of this
        # rank.
        listing = listing_of(folder)
        self._own_listings[listing] += 1
        number = self._own_listings[listing]

        def is_listed() -> bool:
            return self._is_ready or len(self._listings[listing]) >= number

        entries = dict(self._query(path, read, is_listed=is_listed))
        # A slice: rank 0 may have listed the folder less often.
        for made_before in self._listings[listing][number - 1 : number]:
            for name in list(entries):
                if self._made.get(f"{folder}/{name}", -1) >= made_before:
                    del entries[name]
        place = folder.rstrip("/")
        changes = self._before.get(place, {}) | self._own.get(place, {})
        query = self.query("stat")
        for name, actual in changes.items():
            if actual:  # in the place that it has for rank 0, if it exists there
                entries[name] = Entry(query, path, name)
            else:
                entries.pop(name, None)
        return Entries(iter(entries.values()))
