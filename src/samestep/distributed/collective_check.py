"""Collective check: all ranks confirm that they issue the same collective before it communicates.

Collectives of this package begin with a small all-reduce of a hash of their name. If hashes
differ, ranks exchange names and source lines, and every rank raises an error.

Decisions: docs/decisions/rank-checks.md
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger

from samestep.config.exclusions import excluded
from samestep.distributed.status import RankStatus, odd_ranks, ranks_by_value, ranks_text
from samestep.distributed.torch_errors import is_lost_connection
from samestep.errors import InputError, PeerLostError, RankDesyncError

# Of a rank's text in an error, and of its source line.
_TEXT_BYTES = 4000
_LINE_BYTES = 500

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
Line = tuple[str, int]  # file and number


class CollectiveCheck:
    """Compares the collectives of this rank with those of the other ranks.

    `rank_status` receives every wait.

    Attributes:
        before_collective: is called before each collective of the user.
    """

    def __init__(
        self, rank_status: RankStatus, *, rank: int, size: int, timeout: timedelta
    ) -> None:
        self._rank_status = rank_status
        self._rank = rank
        self._size = size
        self._group: dist.ProcessGroup | None = None
        if size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = threading.get_ident()
        self.before_collective: Callable[[], None] | None = None

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Compare the end of the block, an operation of all ranks."""
        name = "end of samestep.init()"
        yield
        with self._rank_status.operation(name):
            self._compare(name)

    def begin_collective(self, name: str) -> None:
        """Check a collective of the user that is called through this package.

        Raises:
            RankDesyncError: ranks issue different operations.
            PeerLostError: another rank is gone.
        """
        if self.before_collective is not None:
            self.before_collective()
        # Threads of a rank are not in step with those of other ranks.
        if threading.get_ident() == self._thread:
            self._compare(name)

    def _compare(self, name: str) -> None:
        """Compare a name between ranks by a small all-reduce; raise on each if they differ."""
        if self._size == 1:
            return
        # 7 bytes: the hash fits into a signed integer of 64 bits.
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        hashes = self._rows(torch.tensor([int.from_bytes(digest, "little")]))
        if len(set(hashes.flatten().tolist())) == 1:
            return
        data = json.dumps([name, line_of_script()[-_LINE_BYTES:]]).encode()
        own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [bytes(row.tolist()).rstrip(b"\0") for row in self._rows(own)]
        raise _difference([json.loads(text) for text in texts])

    def _rows(self, own: torch.Tensor) -> torch.Tensor:
        """Gather integers, one row per rank, in a group apart from collectives of the script."""
        rows = torch.zeros(self._size, len(own), dtype=own.dtype)
        rows[self._rank] = own
        try:
            with self._rank_status.waiting("the collective check"):
                # Each element has one summand other than zero.
                dist.all_reduce(rows, group=self._group)
        except RuntimeError as error:
            # Others are errors of this rank, such as one of a worker of a loader, which a signal
            # handler raises.
            if not is_lost_connection(error):
                raise
            raise PeerLostError(
                f"rank {self._rank} lost its connection to another rank: {error}"
            ) from error
        return rows


def _difference(rows: Sequence[tuple[str, str]]) -> RankDesyncError:
    """Return the error with the names and source lines of the operations of all ranks."""
    odd = odd_ranks({rank: name for rank, (name, _) in enumerate(rows)})
    texts = {rank: f"{name} at {line}" for rank, (name, line) in enumerate(rows)}
    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by_value(texts, odd).items()]
    problem = "ranks diverged"
    subject = "one rank"
    if odd:
        problem = f"{ranks_text(odd)} diverged from the other ranks"
        subject = ranks_text(odd)
    return RankDesyncError(
        "\n    ".join([problem, *lines]),
        expected="every rank issues the same steps, evaluations and collectives in the same order",
        fix=f"look near these lines for code that only {subject} runs or skips, such as "
        "`if world.is_main:`; every rank must call each operation",
    )


# Files whose functions only pass a collective on, some as modes that observe torch's functions.
_ENTRIES = (
    *(dist.distributed_c10d.__file__, c10d_logger.__file__, functools.__file__, __file__),
    *(
        f"{_PACKAGE}{name.replace('/', os.sep)}.py"
        for name in (
            *("session", "distributed/world", "view/operations", "view/rows_sums", "view/watch"),
        )
    ),
    *(
        f"{_TORCH}{name.replace('/', os.sep)}.py"
        for name in (
            *("distributed/_functional_collectives", "distributed/nn/functional", "overrides"),
            *("utils/_contextlib", "utils/_device", "autograd/function"),
        )
    ),
)


def refuse_inside(modules: Container[Any]) -> None:
    """Refuse a collective of the script in a forward of `modules`; it is called before each.

    Ranks compute different rows there, or all the same: the result would depend on their number.
    Collectives of torch's own code pass, as those of FSDP.

    Raises:
        InputError: the calling code is the script, or a library other than torch, in such a call.
    """
    frame: FrameType | None = sys._getframe()
    name = ""
    while frame is not None and frame.f_code.co_filename in _ENTRIES:
        if "<locals>" not in frame.f_code.co_qualname:  # no wrapper
            name = frame.f_code.co_name
        frame = frame.f_back
    # `get_rank` and other queries communicate nothing.
    if frame is None or name.startswith(("get_", "_")):
        return
    file = frame.f_code.co_filename
    if file.startswith((_PACKAGE, _TORCH)):
        return
    for outer, _ in traceback.walk_stack(frame):
        code = outer.f_code
        if not code.co_argcount or code.co_name not in ("forward", "_call_impl"):
            continue
        owner = outer.f_locals.get(code.co_varnames[0])
        if isinstance(owner, torch.nn.Module) and owner in modules:
            facts = (file, frame.f_lineno, name, type(owner).__name__)
            raise excluded("a collective in a call", *facts, error=InputError)


def intercept_all(before: Callable[[], None]) -> ExitStack:
    """Call `before` before each collective of `torch.distributed`, until the result is closed.

    Scripts import its functions by name, so a private helper that all of them call is replaced.
    """
    stack = ExitStack()
    helpers: list[tuple[ModuleType, str]] = [(dist.distributed_c10d, "_rank_not_in_group")]
    functional = sys.modules.get("torch.distributed._functional_collectives")  # slow to import
    if functional is not None:
        name = "_resolve_group"
        if not hasattr(functional, name):  # torch 2.11
            name = "_resolve_group_name"
        helpers.append((functional, name))
    for module, helper in helpers:
        original = getattr(module, helper)

        def checked(*arguments: Any, original: Callable[..., Any] = original) -> Any:
            before()
            return original(*arguments)

        setattr(module, helper, checked)
        stack.callback(setattr, module, helper, original)
    return stack


@functools.cache
def is_library_file(name: str) -> bool:
    """Whether a file of code belongs to Python, to an installed library or to this package."""
    if name.startswith("<frozen") or "site-packages" in name or "dist-packages" in name:
        return True
    return name.startswith((_STANDARD, _PACKAGE))


def script_line(frame: FrameType | None) -> Line:
    """Return the innermost line that is in no installed package, or the outermost line."""
    line = ("", 0)
    while frame is not None:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if not line[0].startswith("<") and not is_library_file(line[0]):
            break
        frame = frame.f_back
    return line


def line_of_script() -> str:
    """Return the line of the script that is being executed, as `FILE:NUMBER`."""
    file, line = script_line(sys._getframe(1))
    return f"{file}:{line}"
