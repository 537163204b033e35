"""Values that a trainer of TRL collects in `compute_loss`, combined over the microbatches of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from samestep.distributed.world import World, all_gather
from samestep.integrations.torch_loader import integration_error

_COLLECTIVES = ("gather", "gather_for_metrics", "reduce")


class MicrobatchMetrics:
    """Metrics of the microbatches of a step.

    Trainers of TRL gather each value over ranks in `compute_loss`, and append it to `_metrics[mode][name]`. Ranks have
    different numbers of microbatches, so each value is that of one microbatch at first, and the lists are gathered
    after the last one, in the order of the microbatches. Other trainers have no such lists: collectives are refused.

    Args:
        trainer: the trainer, whose accelerator gathers.
        world: the ranks.
    """

    def __init__(self, trainer: Any, world: World) -> None:
        self._trainer, self._world = trainer, world
        self._rows: list[tuple[int, str, float]] = []
        self._tokens = 0

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Surround the loss of one microbatch.

        Raises:
            InputError: a collective of the accelerator, in a trainer that does not collect metrics.
        """
        trainer, is_collecting = self._trainer, hasattr(self._trainer, "_metrics")
        for name in _COLLECTIVES:
            setattr(trainer.accelerator, name, _own_values if is_collecting else _refuse(name))
        before = trainer._total_train_tokens if is_collecting else 0
        try:
            yield
        finally:
            for name in _COLLECTIVES:
                delattr(trainer.accelerator, name)
        if is_collecting:
            self._tokens += trainer._total_train_tokens - before
            trainer._total_train_tokens = before
            self._rows += [(number, name, values.pop()) for name, values in self._lists().items() if values]

    def share(self) -> None:
        """Give the values of all microbatches to every rank; a collective."""
        if not hasattr(self._trainer, "_metrics"):
            return
        rows, lists = all_gather([[self._tokens], self._rows], self._world), self._lists()
        self._tokens, self._rows = 0, []
        self._trainer._total_train_tokens += sum(tokens for ((tokens,), _) in rows)
        for _, name, value in sorted((row for _, own in rows for row in own), key=lambda row: row[0]):
            lists[name].append(value)
        if "num_tokens" in lists:
            lists["num_tokens"] = [self._trainer._total_train_tokens]

    def _lists(self) -> Any:
        return self._trainer._metrics["train" if self._trainer.model.training else "eval"]


def _own_values(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _refuse(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise integration_error(
            f"accelerator.{name} in the loss of a microbatch",
            "no collective in compute_loss: ranks have different numbers of microbatches",
            "values of one microbatch; log them in a callback, or compute them in compute_metrics",
        )

    return refuse
