"""Lightning's Trainer as a contender of `step_time.py`: its loop runs in a thread and receives one batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import samestep
from samestep.torchvision_import import make_torchvision_importable

_MANY = 10**9  # a loader of known length: the Trainer fetches no batch ahead


class TrainerLoop:
    """The loop of a Trainer, one step of which runs per call.

    Args:
        model: trained as it is.
        optimizer: of the parameters of `model`.
        world: the ranks; their process group exists.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: samestep.World) -> None:
        self._batch: Any = None
        self._loss: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._is_given, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        # Daemon: the loop has no end.
        threading.Thread(target=self._run, args=(model, optimizer, world), daemon=True).start()
        self._wait()  # for the request of the first batch

    def step(self, batch: Any) -> torch.Tensor:
        """Return the loss of one step, after the Trainer has requested the next batch."""
        self._batch = batch
        self._is_given.release()
        self._wait()
        assert self._loss is not None
        return self._loss

    def _wait(self) -> None:
        self._is_done.acquire()
        if self._error is not None:
            raise self._error

    def _run(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: samestep.World) -> None:
        try:
            self._fit(model, optimizer, world)
        except BaseException as error:  # raised by `step` in the main thread
            self._error = error
        self._is_done.release()

    def _fit(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: samestep.World) -> None:
        make_torchvision_importable()  # Lightning imports torchvision where it is installed
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.plugins.environments import TorchElasticEnvironment
        from lightning.pytorch.strategies import DDPStrategy

        loop = self

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            def training_step(self, batch: Any) -> torch.Tensor:
                inputs, targets = batch
                loss = cross_entropy(self.net(inputs), targets)
                loop._loss = loss.detach()
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return optimizer

        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
        trainer = Trainer(
            accelerator="cpu",
            devices=world.size,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(Module(), _Batches(self))

    def next_batch(self) -> Any:
        """Return the next batch; the end of the previous step."""
        self._is_done.release()
        self._is_given.acquire()
        return self._batch


class _Batches:
    """Batches of `TrainerLoop.step`, as a loader of known length."""

    def __init__(self, loop: TrainerLoop) -> None:
        self._loop = loop

    def __len__(self) -> int:
        return _MANY

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._loop.next_batch()
