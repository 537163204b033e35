"""Looks at the directory of a run, again and again."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from samestep.checkpoint.lock import is_locked
from samestep.errors import InputError
from samestep.tools.top.follow import Follower
from samestep.tools.top.picture import Picture, RankRow, State
from samestep.tools.top.ranks import RankFiles
from samestep.tools.top.told import Told

# A run's directory is there a moment before its recipe is whole.
_PATIENCE_SECONDS = 1.0
_NAP_SECONDS = 0.05


class RunWatch:
    """A run as its files tell; nothing of it needs to be there yet, and nothing is written.

    Args:
        run: its directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._which: tuple[int, int, int] | None = None
        self._forget()

    def look(self) -> Picture | None:
        """The run now; None where there is none yet.

        Raises:
            InputError: the directory is that of something else.
        """
        found = self._recipe()
        if found is None:
            return None
        which, epochs = found
        if which != self._which:
            self._forget()
            self._which, self._epochs = which, epochs
        lock = is_locked(self._run)  # before the events: a run tells its end while it holds it
        self._told.hear(self._events.new_lines())
        self._ranks.look()
        self._read_environment()
        return self._picture(self._state(lock))

    def _forget(self) -> None:
        self._events, self._told = Follower(self._run / "events.jsonl"), Told()
        self._ranks = RankFiles(self._run / "ranks")
        self._epochs, self._entry = 0, dict[str, Any]()

    def _recipe(self) -> tuple[tuple[int, int, int], int] | None:
        """Which file the recipe is, for a run that was removed and made again has another one; and its epochs."""
        patience = time.monotonic() + _PATIENCE_SECONDS
        while self._run.exists():
            try:
                status = os.stat(self._run / "recipe.yaml")
                which = status.st_dev, status.st_ino, status.st_ctime_ns
                return which, self._epochs if which == self._which else _epochs(self._run)
            except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError) as error:
                if time.monotonic() > patience:
                    raise InputError(
                        f"{self._run} is not a run",
                        rule="a run directory has a recipe.yaml, with epochs in it",
                        do="look at the path",
                    ) from error
                time.sleep(_NAP_SECONDS)
        return None

    def _read_environment(self) -> None:
        try:
            entries = json.loads((self._run / "environment.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except ValueError:
            return  # it is being written; the next look finds it whole
        if entries:
            self._entry = entries[-1]

    def _state(self, lock: bool | None) -> State:
        if lock:
            return "running"
        if self._told.ended_as is not None:
            return self._told.ended_as
        if self._ranks.are_fresh:
            return "running"  # before rank 0 has the lock, or where there are none
        return "dead" if self._entry or self._told.last_step or self._ranks.have_told else "starting"

    def _rows(self, state: State) -> list[RankRow]:
        started = self._entry.get("started")
        # Whole seconds: what an earlier part wrote in the same one is not of this part.
        since = datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z").timestamp() + 1 if started else 0.0
        is_expected = state in ("running", "dead")
        return self._ranks.rows(self._entry.get("processes"), since, is_expected=is_expected)

    def _picture(self, state: State) -> Picture:
        last = self._told.last_step
        steps_in_epoch = int(last.get("steps_in_epoch", 0))
        done = int(last.get("epoch", 0)) * steps_in_epoch + int(last.get("step_in_epoch", 0))
        steps = self._epochs * steps_in_epoch
        pace = self._told.seconds_a_step(until=self._ranks.time_of(0))
        is_open = state == "running" and steps > done and pace is not None
        return Picture(
            run=str(self._run),
            state=state,
            epoch=int(last.get("epoch", -1)) + 1,
            epochs=self._epochs,
            step=int(last.get("step", 0)),
            steps=steps or None,
            progress=round(done / steps, 4) if steps else 0.0,
            seconds_left=round((steps - done) * pace, 1) if is_open and pace is not None else None,
            loss=last.get("loss"),
            evaluation=self._told.values,
            ranks=self._rows(state),
            unreadable_lines=self._told.unreadable + self._ranks.unreadable,
        )


def _epochs(run: Path) -> int:
    return int(yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["epochs"])
