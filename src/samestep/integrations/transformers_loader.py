"""Data loaders of Samestep as the trainer of Hugging Face uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.integrations.torch_loader import require_same_data
from samestep.microbatches import Cursor


class StepDataset(Dataset[GlobalBatch]):
    """Global batches of one epoch by number; consecutive ones are loaded ahead."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self._epoch = loader, 0
        self._batches: Iterator[GlobalBatch] | None = None
        self._next = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the batches."""
        self._epoch, self._batches = epoch, None

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, number: int) -> GlobalBatch:
        if self._batches is None or number != self._next:
            self.loader.cursor = Cursor(self._epoch, number * self.loader.batch_size)
            self._batches = iter(self.loader)
        self._next = number + 1
        return next(self._batches)


class StepDataLoader(DataLoader[GlobalBatch]):
    """Loader with one global batch per item, which `accelerate.skip_first_batches` can begin at any batch."""

    def __init__(self, loader: Loader) -> None:
        self.steps = StepDataset(loader)
        super().__init__(self.steps, batch_sampler=_StepSampler(self.steps), collate_fn=_only_item)

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the batches."""
        self.steps.set_epoch(epoch)


class _StepSampler(BatchSampler):
    """Batches of one number, by which the trainer selects the epoch if it skips batches."""

    def __init__(self, steps: StepDataset) -> None:
        super().__init__(SequentialSampler(steps), 1, drop_last=False)
        self.set_epoch = steps.set_epoch


def _only_item(items: list[Any]) -> Any:
    (item,) = items
    return item


class EvaluationDataLoader:
    """Loader of global batches for an evaluation."""

    def __init__(self, loader: Loader, dataset: Any) -> None:
        self.dataset, self._loader = dataset, loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self._loader.complete_epoch()


class SamestepCallback(TrainerCallback, ExportableState):
    """Saves the settings of the training data with the state of the trainer, and compares them after a resumption.

    Attributes:
        loader: the loader of the training data, once it exists.
    """

    def __init__(self) -> None:
        self.loader: Loader | None = None

    def state(self) -> dict[str, Any]:
        """Return the settings for a checkpoint."""
        settings = {} if self.loader is None else self.loader.settings_of(0)
        return {"args": {}, "attributes": {"settings": settings}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse a resumption with other batches."""
        callbacks: Any = state.stateful_callbacks  # states by name, once the trainer has begun
        # A checkpoint of `transformers.Trainer` has no such state, and saving needs one.
        saved = callbacks.setdefault(type(self).__name__, self.state())["attributes"]["settings"]
        if self.loader is not None:
            require_same_data(self.loader, saved)
