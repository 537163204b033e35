"""Resumption, data loaders and signals of Lightning's loops, on the ranks of `helpers.forked_ranks`."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from samestep.integrations.lightning import SamestepStrategy
from workers.lightning_training import BATCH, MICROBATCHES, SEED, Module, _loaders, _trainer, dataset, digest

EPOCH = 16  # steps of an epoch
STOPPED_AT = 20  # step in the second epoch, during which a rank receives a signal


class Estimating(Module):
    """Reads the number of steps before Lightning restores the state of a checkpoint."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook
        self.estimated = 0

    def _estimate(self, hook: str) -> None:
        if hook == self.hook:
            self.estimated = int(self.trainer.estimated_stepping_batches)

    def setup(self, stage: str) -> None:
        self._estimate("setup")

    def configure_optimizers(self) -> Any:
        self._estimate("configure_optimizers")
        return super().configure_optimizers()


def estimated(folder: str) -> dict[str, Any]:
    """Return the weights of whole and of resumed trainings, with the numbers of steps that a hook reads."""
    results = {}
    for hook in ("", "configure_optimizers", "setup"):
        path = Path(folder) / (hook or "none")
        checkpoint = ModelCheckpoint(path, filename="saved", every_n_train_steps=STOPPED_AT, save_top_k=1)
        # Without a number of microbatches, because "auto" depends on the module.
        strategies = [SamestepStrategy(seed=SEED) for _ in range(2)]
        whole, resumed = Estimating(hook), Estimating(hook)
        trainer = _trainer(strategy=strategies[0], callbacks=[checkpoint], enable_checkpointing=True)
        trainer.fit(whole, *_loaders())
        _trainer(strategy=strategies[1]).fit(resumed, *_loaders(), ckpt_path=str(path / "saved.ckpt"))
        results[hook] = [whole.estimated, digest(whole.net), digest(resumed.net)]
    return results


class ZeroingInPlace(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Counting(Module):
    """Logs in a hook of batches, with the size of the batch as the weight."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("number", float(batch_idx), on_step=False, on_epoch=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_number", float(batch_idx))


def batches() -> dict[str, Any]:
    """Return weights, and the values that hooks of batches log."""
    modules = [Module(), ZeroingInPlace(), Counting()]
    for module in modules:
        trainer = _trainer(max_epochs=1)
        trainer.fit(module, *_loaders())
    values = [float(trainer.callback_metrics[name]) for name in ("number", "val_number")]
    return {"weights": [digest(module.net) for module in modules], "values": values}


def loaders_again() -> dict[str, Any]:
    """Use the same `CombinedLoader` for each epoch of a training, and for evaluation and predictions."""
    module = Module()
    train = CombinedLoader(DataLoader(dataset(100), batch_size=BATCH, shuffle=True), "max_size_cycle")
    tests = CombinedLoader(DataLoader(dataset(41), batch_size=20), "sequential")
    trainer = _trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, train, tests)
    predicted = [torch.cat(_trainer().predict(module, tests)).tolist() for _ in range(2)]
    (values,) = trainer.validate(module, tests, verbose=False)
    single = [DataLoader(dataset(41), batch_size=20)]
    (expected,) = _trainer().validate(module, single, verbose=False)
    return {"steps": len(module.steps), "predicted": predicted, "values": values, "expected": expected}


class Signalled(Module):
    """Sends a signal to the last rank in the first microbatch of a step."""

    def __init__(self, number: int = 0, step: int = STOPPED_AT) -> None:
        super().__init__()
        self.number, self.step = number, step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        is_last = self.global_rank == self.trainer.world_size - 1
        if self.number and is_last and self.trainer.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)
            self.number = 0
        return super().training_step(batch, batch_idx)


def stopped(folder: str) -> list[Any]:
    """Stop within the second epoch, and after the first one; return steps, samples of validation and exceptions."""
    rows: list[Any] = []
    for name, step in (("within", STOPPED_AT), ("after", EPOCH)):
        module = Signalled(signal.SIGTERM, step)
        before = signal.getsignal(signal.SIGTERM)
        trainer = _trainer(callbacks=[OnExceptionCheckpoint(folder, name)], enable_checkpointing=True)
        ended = ""
        try:
            trainer.fit(module, *_loaders())
        except SIGTERMException as error:
            ended = type(error).__name__
        assert signal.getsignal(signal.SIGTERM) == before
        rows.append([len(module.steps), float(trainer.callback_metrics["val_samples"]), ended])
    return rows


def requeued(folder: str) -> list[Any]:
    """Receive the signal of Slurm before the end of a job; return the steps, and the files that are saved."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ |= {"SLURM_NTASKS": size, "SLURM_NTASKS_PER_NODE": size, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    os.environ |= {"SLURM_NODEID": "0", "SLURM_JOB_ID": "11", "SLURM_JOB_NAME": "test"}
    strategy = SamestepStrategy(microbatches=MICROBATCHES, seed=SEED, cluster_environment=SLURMEnvironment())
    module = Signalled(signal.SIGUSR1)
    _trainer(strategy=strategy, default_root_dir=folder).fit(module, *_loaders())
    return [len(module.steps), digest(module.net), sorted(path.name for path in Path(folder).glob("*.ckpt"))]


def resumed(path: str) -> list[Any]:
    """Return the steps and the weights of a training from a checkpoint, or of a whole one."""
    module = Module()
    _trainer().fit(module, *_loaders(), ckpt_path=path or None)
    return [len(module.steps), digest(module.net)]
