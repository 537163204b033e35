"""Runs trials of a subject, each combination once, and compares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from samestep.checkpoint.store import CheckpointFolder
from samestep.config import DeviceKind
from samestep.errors import RunError
from samestep.runtime.by_name import ByName
from samestep.runtime.launch import RankError, StoppedError, launch
from samestep.tools.verify.compare import compare
from samestep.tools.verify.difference import Comparison
from samestep.tools.verify.plan import Held, Subject, Trial, in_words
from samestep.tools.verify.record import Record, joined, read_record

_RUN = ByName("samestep.tools.verify.trial", "run")
PRELOAD = ("samestep.tools.verify.trial",)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all trials of one verification share.

    Attributes:
        steps: as of `Trial`.
        held: what is held in all of them: float64, or a reduction.
        tolerance: largest relative difference that is allowed; None asks for the same bits.
        patience: as of `Trial`.
    """

    steps: int | None
    device: DeviceKind = "auto"
    held: Held = field(default_factory=Held)
    tolerance: float | None = None
    patience: float = 120.0


class Lab:
    """The trials of one verification.

    Args:
        folder: where trials leave what they write.
        preload: modules that all ranks need.
        tell: hears what is run next.
    """

    def __init__(
        self,
        subject: Subject,
        conditions: Conditions,
        folder: Path,
        *,
        preload: tuple[str, ...],
        tell: Callable[[str], None],
    ) -> None:
        self.subject, self.conditions = subject, conditions
        self._folder, self._preload, self._tell = folder, (*preload, *PRELOAD), tell
        self._numbers = count(1)
        self._known: dict[tuple[int, Held, bool, Path | None], Record] = {}

    def trial(
        self, processes: int, held: Held | None = None, *, reference: Record | None = None, cuts_losses: bool = False
    ) -> Record:
        """A run on so many processes; with a reference, tensors are measured against it, else they are written."""
        held = held or self.conditions.held
        key = (processes, held, cuts_losses, reference.folder if reference else None)
        if key not in self._known:
            self._tell(f"{in_words(processes)}{_holding(held)}")
            self._known[key] = self._run(
                self._plan(processes, held, reference=reference, values=reference is None, cuts_losses=cuts_losses)
            )
        return self._known[key]

    def again(self, record: Record, held: Held | None = None) -> Record:
        """The same run once more, measured against the first."""
        held = held or self.conditions.held
        self._tell(f"{in_words(record.processes)} once more{_holding(held)}")
        return self._run(self._plan(record.processes, held, reference=record))

    def killed(self, processes: int, kill_at: int, resume_on: int, reference: Record) -> Record:
        """A run whose last rank is killed in a step, gone on from its newest checkpoint on other processes."""
        label = f"{processes}, killed in step {kill_at}, then {resume_on}"
        self._tell(label)
        held = self.conditions.held
        plan = self._plan(processes, held, reference=reference, kill_at=kill_at)
        first = self._run(plan)
        if first.failure is None or first.failure.by_signal is None:
            raise RunError(
                f"the run on {processes} processes was not killed in step {kill_at}: it ended before",
                do="choose --kill-at within the first --steps, and within an epoch",
            )
        # A script resumes by itself, from what it left in its folder.
        folder = CheckpointFolder(plan.folder / "checkpoints")
        newest = folder.find("last") if self.subject.recipe is not None and kill_at > 1 else None
        scratch = plan.folder / "scratch"
        return joined(
            first,
            self._run(self._plan(resume_on, held, reference=reference, checkpoint=newest, scratch=scratch)),
            label,
        )

    def pair(self, one: int, other: int, held: Held) -> tuple[Record, Record, Comparison]:
        """Two runs of an experiment, compared as the verification does."""
        reference = self.trial(one, held)
        measured = self.trial(other, held, reference=reference)
        return reference, measured, compare(reference, measured, self.conditions.tolerance)

    def hold(self, **held: object) -> Held:
        """What all trials hold, and something more."""
        return replace(self.conditions.held, **held)  # type: ignore[arg-type]

    def _plan(self, processes: int, held: Held, *, reference: Record | None, **more: object) -> Trial:
        folder = self._folder / f"trial-{next(self._numbers)}"
        folder.mkdir()
        shared = self.conditions
        return Trial(
            folder=folder,
            processes=processes,
            steps=shared.steps,
            device=shared.device,
            held=held,
            patience=shared.patience,
            reference=reference.folder if reference else None,
            **more,  # type: ignore[arg-type]
        )

    def _run(self, trial: Trial) -> Record:
        failure, was_stopped = None, False
        try:
            was_stopped = launch(
                _RUN,
                self.subject,
                trial,
                processes=trial.processes,
                log_dir=trial.folder / "logs",
                preload=self._preload,
            )
        except RankError as error:
            failure = error.failure
        if was_stopped:
            raise StoppedError("the verification was stopped", do="start it again; there is no certificate of a part")
        return read_record(trial.folder, trial.processes, failure)


def _holding(held: Held) -> str:
    """What is held, in words: `, float64, one thread`."""
    words = {
        "reduction": f"{held.reduction} reduction",
        "double": "float64",
        "one_thread": "one thread a rank",
        "rates": "the reference's learning rates",
        "generators": "the model's generators seeded by shard",
        "state": "the model's other state as at first",
        "resting": f"{held.resting or 'the model'} in evaluation mode",
        "rehearsed": "every forward rehearsed",
        "twice": "every sample made twice",
    }
    said = [text for name, text in words.items() if getattr(held, name) not in (None, False)]
    return "".join(f", {text}" for text in said)
