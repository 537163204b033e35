"""Observer of random draws: states of the generators before augmentations and dropout."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data._utils import fetch as torch_fetch

from samestep.tools.audit.events import user_line
from samestep.tools.audit.observers.session import Session, sample_numbers

_FETCHES = 16  # observed batches per process
_DROPOUT_STEPS = 10
_DROPOUT_CALLS = 4  # of a step


class DrawObserver:
    """Observer of the draws in `fetch`, in loader workers too, and of `dropout`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._fetches = 0
        self._before: dict[str, int] = {}
        self._step = -1
        self._calls = 0

    def begins_fetch(self) -> None:
        """Store the states of the generators before a batch."""
        self._fetches += 1
        self._before = _states() if self._fetches <= _FETCHES else {}

    def ends_fetch(self, index: Any) -> None:
        """Write the states of the generators that a batch used."""
        before, self._before = self._before, {}
        if not before:
            return
        after = _states()
        used = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
        samples = sample_numbers(index)
        if used and samples is not None:
            self._session.emit("fetch_draws", samples=samples, states=used)

    def dropout(self, values: torch.Tensor) -> None:
        """Write the state of the generator before a dropout."""
        session = self._session
        if session.steps >= _DROPOUT_STEPS:
            return
        if session.steps != self._step:
            self._step, self._calls = session.steps, 0
        self._calls += 1
        if self._calls <= _DROPOUT_CALLS:
            state = _hash(_generator_state(values.device))
            session.emit("dropout", call=self._calls, shape=list(values.shape), state=state, line=user_line())


def observe_draws(session: Session) -> None:
    """Observe the fetches of map-style datasets and calls of `dropout`."""
    observer = DrawObserver(session)
    begins, ends = session.guarded(observer.begins_fetch), session.guarded(observer.ends_fetch)
    dropped = session.guarded(observer.dropout)
    patched: Any = torch_fetch._MapDatasetFetcher
    fetch = patched.fetch

    def observed_fetch(self: Any, index: Any) -> Any:
        begins()
        data = fetch(self, index)
        ends(index)
        return data

    patched.fetch = observed_fetch
    dropout = F.dropout

    def observed_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p > 0 and not torch.compiler.is_compiling():
            dropped(input)
        return dropout(input, p, training, inplace)

    replace_function("dropout", observed_dropout)


def replace_function(name: str, observed: Any) -> None:
    """Replace a function of `torch.nn.functional`, except while TorchScript compiles a module."""
    functional: Any = F
    jit: Any = torch.jit
    original, script = getattr(F, name), torch.jit.script

    def observed_script(*args: Any, **kwargs: Any) -> Any:
        setattr(functional, name, original)
        try:
            return script(*args, **kwargs)
        finally:
            setattr(functional, name, observed)

    setattr(functional, name, observed)
    jit.script = observed_script


def _states() -> dict[str, int]:
    """Return hashes of the states of the generators of torch, Python and NumPy."""
    states = {"torch": _hash(torch.get_rng_state()), "random": hash(random.getstate()[1])}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy"] = zlib.crc32(keys.tobytes(), position)
    return states


def _generator_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _hash(state: torch.Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())
