"""Installation of all observers, after the import of torch."""

from __future__ import annotations

from samestep.tools.audit.events import EventWriter
from samestep.tools.audit.observers.draws import observe_draws
from samestep.tools.audit.observers.files import observe_files
from samestep.tools.audit.observers.loading import observe_loading
from samestep.tools.audit.observers.losses import observe_losses
from samestep.tools.audit.observers.session import Session
from samestep.tools.audit.observers.steps import observe_steps


def install_observers(writer: EventWriter, steps: int) -> None:
    """Observe loaders, random draws, optimizers, losses and files of this process."""
    session = Session(writer, steps)
    observe_loading(session, observe_steps(session))
    observe_draws(session)
    observe_losses(session)
    observe_files(session)
