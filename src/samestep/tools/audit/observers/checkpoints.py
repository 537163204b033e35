"""Observer of checkpoints: the position in the data when one is saved, and the run that loads it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from samestep.tools.audit.events import user_line
from samestep.tools.audit.observers.session import Session


def observe_checkpoints(session: Session) -> None:
    """Observe `torch.save` and `torch.load` of files, and optimizers that load a state."""
    patched: Any = torch
    optimizer: Any = Optimizer
    save, load, load_state = torch.save, torch.load, optimizer.load_state_dict

    def saved(file: Any) -> None:
        positions = session.positions()
        if positions:
            session.emit("saved", key=_key(file), name=os.fsdecode(file), positions=positions)

    def loaded(file: Any) -> None:
        session.emit("loaded", key=_key(file))

    def state_loaded() -> None:
        session.emit("optimizer_loaded", line=user_line())

    observed_saved, observed_loaded = session.guarded(saved), session.guarded(loaded)
    observed_state = session.guarded(state_loaded)

    def observed_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        result = save(obj, f, *args, **kwargs)
        if isinstance(f, str | os.PathLike):
            observed_saved(f)
        return result

    def observed_load(f: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(f, *args, **kwargs)
        if isinstance(f, str | os.PathLike):
            observed_loaded(f)
        return result

    def observed_load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        observed_state()
        return load_state(self, *args, **kwargs)

    patched.save, patched.load = observed_save, observed_load
    optimizer.load_state_dict = observed_load_state


def _key(file: Any) -> list[int]:
    """Return the identity of the content of a file, which a rename does not change."""
    status = os.stat(file)
    return [status.st_ino, status.st_mtime_ns]
