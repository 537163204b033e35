"""Observer of random draws in fetches: states of the generators before and after each batch."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch
from torch.utils.data._utils import fetch as torch_fetch

from samestep.tools.audit.observers.session import Session, sample_numbers

_FETCHES = 16  # observed batches per process


class DrawObserver:
    """Observer of the draws in `fetch`, in loader workers too."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._fetches = 0
        self._before: dict[str, int] = {}

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


def observe_fetches(session: Session) -> None:
    """Observe the fetches of map-style datasets."""
    observer = DrawObserver(session)
    begins, ends = session.guarded(observer.begins_fetch), session.guarded(observer.ends_fetch)
    patched: Any = torch_fetch._MapDatasetFetcher
    fetch = patched.fetch

    def observed_fetch(self: Any, index: Any) -> Any:
        begins()
        data = fetch(self, index)
        ends(index)
        return data

    patched.fetch = observed_fetch


def _states() -> dict[str, int]:
    """Return hashes of the states of the generators of torch, Python and NumPy."""
    states = {"torch": state_hash(torch.get_rng_state()), "random": hash(random.getstate()[1])}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy"] = zlib.crc32(keys.tobytes(), position)
    return states


def state_hash(state: torch.Tensor) -> int:
    """Return a hash of the state of a generator."""
    return zlib.crc32(state.numpy().tobytes())
