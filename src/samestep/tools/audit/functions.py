"""Observers of functions: dropout, attention, batch norm, losses; opened files.

An experiment turns dropout and batch norm off. The losses are means over a number of targets that
varies between ranks and batches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from samestep.tools.audit.events import user_line
from samestep.tools.audit.session import Session, state_hash

_STEPS = 10  # with observed calls of dropout
_CALLS = 4  # of a step
# Files of libraries that write them by several processes on purpose: locks and caches.
_SUFFIXES = (".lock", ".pyc", ".pid")
_FOLDERS = ("/dev/", "/proc/", "/sys/")
_CACHES = (".cache", "__pycache__", "matplotlib", "torchinductor_", "triton", "site-packages")


class FunctionObserver:
    """Observer of dropout, in attention too, of batch norm in training mode, and of losses."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._step = -1
        self._calls = 0
        self._has_batch_norm = False

    def dropout(self, values: torch.Tensor) -> None:
        """Write the state of the generator before a dropout."""
        session = self._session
        if session.steps >= _STEPS:
            return
        if session.steps != self._step:
            self._step = session.steps
            self._calls = 0
        self._calls += 1
        if self._calls <= _CALLS:
            state = torch.get_rng_state()
            if values.device.type != "cpu":
                state = torch.get_device_module(values.device).get_rng_state(values.device)
            shape = list(values.shape)
            facts = {"call": self._calls, "shape": shape, "state": state_hash(state)}
            session.emit("dropout", **facts, line=user_line())

    def batch_norm(self) -> None:
        """Write that batches are normalised with their own statistics, once."""
        if not self._has_batch_norm:
            self._has_batch_norm = True
            self._session.emit("batch_norm", line=user_line())

    def loss(self, loss: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
        """Write the gradient of a mean over targets that are not ignored, when it is computed."""
        session = self._session
        if not session.is_observed or not loss.requires_grad or target.is_floating_point():
            return
        count = int((target != ignore_index).sum())
        line = user_line()
        value = loss.detach()

        def backward(gradient: torch.Tensor) -> None:
            session.emit("loss", count=count, value=float(value), scale=float(gradient), line=line)

        loss.register_hook(session.guarded(backward))


def observe_functions(session: Session) -> None:
    """Observe dropout, attention, batch norm, and `cross_entropy` with class indices."""
    observer = FunctionObserver(session)
    dropped = session.guarded(observer.dropout)
    normalised = session.guarded(observer.batch_norm)
    dropout = F.dropout
    attention = F.scaled_dot_product_attention
    batch_norm = F.batch_norm
    has_dropout = "dropout" not in session.without
    has_batch_norm = "batch norm" not in session.without

    # These have the signatures of torch.

    def observed_dropout(
        input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if training and p > 0 and not torch.compiler.is_compiling():
            dropped(input)
        return dropout(input, p, training and has_dropout, inplace)

    def observed_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if dropout_p > 0 and not torch.compiler.is_compiling():
            dropped(query)
        return attention(query, key, value, attn_mask, dropout_p * has_dropout, *args, **kwargs)

    def observed_batch_norm(
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if training and not torch.compiler.is_compiling():
            normalised()
        training = training and (has_batch_norm or running_mean is None)
        return batch_norm(input, running_mean, running_var, weight, bias, training, *args, **kwargs)

    _replace("dropout", observed_dropout)
    _replace("scaled_dot_product_attention", observed_attention)
    _replace("batch_norm", observed_batch_norm)
    _observe_losses(session.guarded(observer.loss))


def _observe_losses(computed: Callable[..., None]) -> None:
    cross_entropy = F.cross_entropy

    def observed_cross_entropy(
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        loss = cross_entropy(input, target, *options)
        is_mean = reduction == "mean" and weight is None and size_average is None and reduce is None
        if is_mean and not torch.compiler.is_compiling():
            computed(loss, target, ignore_index)
        return loss

    _replace("cross_entropy", observed_cross_entropy)


def _replace(name: str, observed: Any) -> None:
    """Replace a function of `torch.nn.functional`, except while TorchScript compiles a module."""
    functional: Any = F
    jit: Any = torch.jit
    original = getattr(F, name)
    script = torch.jit.script

    def observed_script(*args: Any, **kwargs: Any) -> Any:
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
        writes = flags & (os.O_WRONLY | os.O_RDWR) and flags & os.O_TRUNC and not flags & os.O_EXCL
        if writes and isinstance(path, str | bytes | os.PathLike):
            self.written(path)

    def written(self, path: Any) -> None:
        """Write the path of a file, once."""
        if torch.utils.data.get_worker_info() is not None:
            return
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

    sys.addaudithook(hook)
    session.observe(torch, "save", before=observer.saves)
