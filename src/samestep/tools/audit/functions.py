"""Observers of functions: dropout, attention, losses; opened files.

The losses are means over a number of targets that varies between ranks and batches.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from samestep.tools.audit.events import user_line
from samestep.tools.audit.session import Session
from samestep.tools.audit.steps import is_observed

_STEPS = 10  # with observed calls of dropout
_CALLS = 4  # of a step
# Files of libraries that write them by several processes on purpose: locks and caches.
_SUFFIXES = (".lock", ".pyc", ".pid")
_FOLDERS = ("/dev/", "/proc/", "/sys/")
_CACHES = (".cache", "__pycache__", "matplotlib", "torchinductor_", "triton", "site-packages")


class FunctionObserver:
    """Observer of dropout, in attention too, and of losses; methods have torch's signatures."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._step = -1
        self._calls = 0

    def dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> None:
        """Write the state of the generator before a dropout."""
        session = self._session
        # Equal seeds show in the first steps; a state of the generator costs some time.
        if not training or p == 0 or session.steps >= _STEPS:
            return
        if session.steps != self._step:
            self._step = session.steps
            self._calls = 0
        self._calls += 1
        if self._calls <= _CALLS:
            state = torch.get_rng_state()
            if input.device.type != "cpu":
                state = torch.get_device_module(input.device).get_rng_state(input.device)
            facts = {"call": self._calls, "shape": list(input.shape)}
            number = zlib.crc32(state.numpy().tobytes())
            session.emit("dropout", **facts, state=number, line=user_line())

    def attention(
        self,
        query: torch.Tensor,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *_: Any,
        **__: Any,
    ) -> None:
        """Write the state of the generator before the dropout of an attention."""
        self.dropout(query, dropout_p)

    def cross_entropy(
        self,
        loss: torch.Tensor,
        input: Any,
        target: torch.Tensor,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        """Write the gradient of a mean over targets that are not ignored, when it is computed."""
        session = self._session
        # The older arguments replace `reduction`.
        is_mean = reduction == "mean" and weight is None and size_average is None and reduce is None
        # Targets can also be probabilities, of which none is ignored.
        has_classes = loss.requires_grad and not target.is_floating_point()
        if not (is_mean and has_classes and is_observed(session.steps)):
            return
        count = int((target != ignore_index).sum())
        line = user_line()

        def backward(gradient: torch.Tensor) -> None:
            session.emit("loss", count=count, scale=float(gradient), line=line)

        loss.register_hook(session.guarded(backward))


def observe_functions(session: Session) -> None:
    """Observe dropout, attention, and `cross_entropy` with class indices."""
    observer = FunctionObserver(session)
    _observe(session, "dropout", before=observer.dropout)
    _observe(session, "scaled_dot_product_attention", before=observer.attention)
    _observe(session, "cross_entropy", after=observer.cross_entropy)


def _observe(session: Session, name: str, **observers: Callable[..., None]) -> None:
    """Observe a function of `torch.nn.functional`, except while torch compiles code."""
    functional: Any = F
    jit: Any = torch.jit
    original = getattr(F, name)
    script = torch.jit.script
    session.observe(F, name, **observers)
    eager = getattr(F, name)

    def observed(*args: Any, **kwargs: Any) -> Any:
        # An observer would break the compiled graph.
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return eager(*args, **kwargs)

    def observed_script(*args: Any, **kwargs: Any) -> Any:
        # TorchScript compiles the source of the function, and not that of an observer.
        setattr(functional, name, original)
        try:
            return script(*args, **kwargs)
        finally:
            setattr(functional, name, observed)

    setattr(functional, name, observed)
    jit.script = observed_script


# --- files --------------------------------------------------------------------------------------


class FileObserver:
    """Observer of files that are opened for writing."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._paths: set[str] = set()
        self._pid = os.getpid()

    def opened(self, path: Any, flags: int) -> None:
        """Write the path of a file that is emptied."""
        # With O_EXCL, one process creates the file, and the others fail.
        writes = flags & (os.O_WRONLY | os.O_RDWR) and flags & os.O_TRUNC and not flags & os.O_EXCL
        if writes and isinstance(path, str | bytes | os.PathLike):
            self.written(path)

    def written(self, path: Any) -> None:
        """Write the path of a file, once."""
        if torch.utils.data.get_worker_info() is not None:
            return
        # A fork can be another rank, which has written none of these.
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._paths.clear()
        name = os.path.abspath(os.fsdecode(path))
        if name in self._paths or name.startswith(_FOLDERS) or name.endswith(_SUFFIXES):
            return
        # With a lock, one rank writes at a time, as the metrics of `evaluate`.
        is_locked = os.path.exists(f"{name}.lock")
        if is_locked or any(part.startswith(_CACHES) for part in Path(name).parts):
            return
        line = user_line()
        if line:
            self._paths.add(name)
            self._session.emit("file", path=name, line=line)

    def saves(self, obj: Any, f: Any, *_: Any, **__: Any) -> None:
        """Write the path of a checkpoint, which torch writes without Python's `open`."""
        if isinstance(f, str | os.PathLike):
            self.written(f)


def observe_files(session: Session) -> None:
    """Observe opened files, and those of `torch.save`."""
    observer = FileObserver(session)
    opened = session.guarded(observer.opened)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and len(arguments) == 3 and isinstance(arguments[2], int):
            opened(arguments[0], arguments[2])

    # An event of Python: `open`, `os.open` and `Path` all raise the same one.
    sys.addaudithook(hook)
    session.observe(torch, "save", before=observer.saves)
