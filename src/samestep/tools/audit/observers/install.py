"""Installation of all observers, after the import of torch."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.tools.audit.events import EventWriter
from samestep.tools.audit.observers.checkpoints import observe_checkpoints
from samestep.tools.audit.observers.draws import observe_fetches
from samestep.tools.audit.observers.files import observe_files
from samestep.tools.audit.observers.loading import observe_loading
from samestep.tools.audit.observers.losses import observe_losses
from samestep.tools.audit.observers.modules import observe_modules
from samestep.tools.audit.observers.session import Session
from samestep.tools.audit.observers.steps import observe_steps


def install_observers(writer: EventWriter, steps: int, without: Sequence[str]) -> None:
    """Observe loaders, random draws, optimizers, losses, files and checkpoints of this process; see `Session`."""
    session = Session(writer, steps, without)
    observe_loading(session, observe_steps(session))
    observe_fetches(session)
    observe_modules(session)
    observe_losses(session)
    observe_files(session)
    observe_checkpoints(session)
