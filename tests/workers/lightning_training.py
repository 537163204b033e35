"""Training with Lightning and with Samestep's own loop, on the ranks of `helpers.forked_ranks`."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.overrides import distributed
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

import samestep
from helpers.forked_ranks import refusal
from helpers.models import digest
from samestep.integrations.lightning import SamestepStrategy

SAMPLES, BATCH, MICROBATCHES, EPOCHS, SEED, CLASSES = 1003, 64, 8, 2, 5, 4
CLIP = 0.5
STEPS = EPOCHS * (-(-SAMPLES // BATCH))
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "num_sanity_val_steps": 1,
}
warnings.filterwarnings("ignore")


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 12, generator=generator)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, CLASSES))


def optimizer_of(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


class Module(lightning.LightningModule):
    """As people write it, with no line for Samestep."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        micro = {"num_classes": CLASSES, "average": "micro"}
        self.pair = MetricCollection([MulticlassAccuracy(**micro), MulticlassPrecision(**micro)])
        self.steps: list[list[float]] = []
        self.epochs: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        outputs = self.net(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(targets)), reduce_fx="sum")
        self.train_accuracy(outputs, targets)
        self.pair.update(outputs, targets)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = self.trainer.callback_metrics
        self.steps.append([float(metrics[name]) for name in ("train_loss_step", "samples")] + [float(outputs["loss"])])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self.net(inputs)
        self.accuracy(outputs, targets)
        self.log("val_loss", nn.functional.cross_entropy(outputs, targets))
        self.log("val_accuracy", self.accuracy)
        self.log("val_samples", float(len(targets)), reduce_fx="sum")

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).argmax(1)

    def on_train_epoch_end(self) -> None:
        names = ("train_loss_epoch", "train_accuracy", "val_loss", "val_accuracy", "val_samples")
        metrics = self.trainer.callback_metrics
        self.epochs.append([float(metrics[name]) for name in names if name in metrics])
        counted = {float(value) for value in self.pair.compute().values()}
        assert counted == {self.epochs[-1][1]}
        self.pair.reset()

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = optimizer_of(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _trainer(**options: Any) -> lightning.Trainer:
    import os

    strategy = options.pop("strategy", None) or SamestepStrategy(microbatches=MICROBATCHES, seed=SEED)
    options = {"max_epochs": EPOCHS, "gradient_clip_val": CLIP, "enable_checkpointing": False, **QUIET, **options}
    return lightning.Trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), **options)


def _loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(dataset(), batch_size=BATCH, shuffle=True), DataLoader(dataset(203), batch_size=40)


def train(folder: str | None = None, save_at: int | None = None, resume: bool = False) -> dict[str, Any]:
    """Train, or train from a checkpoint of Lightning in the middle of an epoch; return values that must be equal."""
    module, options = Module(), dict[str, Any]()
    if folder is not None:
        options["strategy"] = SamestepStrategy(microbatches=MICROBATCHES, seed=SEED, run=Path(folder) / "run")
    if save_at is not None:
        checkpoint = ModelCheckpoint(folder, filename="saved", every_n_train_steps=save_at, save_top_k=1)
        options |= {"callbacks": [checkpoint], "enable_checkpointing": True, "max_steps": save_at}
    trainer = _trainer(**options)
    trainer.fit(module, *_loaders(), ckpt_path=str(Path(str(folder)) / "saved.ckpt") if resume else None)
    return {"weights": digest(module.net), "steps": module.steps, "epochs": module.epochs}


def evaluate() -> dict[str, Any]:
    module, loader = Module(), _loaders()[1]
    trainer = _trainer()
    (validated,) = trainer.validate(module, loader, verbose=False)
    (tested,) = trainer.test(module, loader, verbose=False)
    predicted = torch.cat(trainer.predict(module, loader))
    return {"validate": validated, "test": tested, "predict": predicted.tolist()}


def _mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


class _TorchClipping(samestep.Callback):
    """Clips as the libraries do, by torch's norm, in place of `clip_norm`."""

    def end_gradients(self, engine: samestep.Engine) -> None:
        nn.utils.clip_grad_norm_(engine.model.parameters(), CLIP)


def own_loop() -> dict[str, Any]:
    """The same training in Samestep's own loop."""
    model = net()
    optimizer, scheduler = optimizer_of(model)
    with samestep.start(device="cpu") as world:
        config = samestep.StepConfig(seed=SEED)
        engine = samestep.Engine(
            model,
            optimizer,
            world=world,
            scheduler=scheduler,
            scheduler_interval="step",
            config=config,
            callbacks=[_TorchClipping()],
        )
        batches = samestep.loader(
            dataset(), batch_size=BATCH, microbatches=MICROBATCHES, seed=SEED, shuffle=True, world=world
        )
        losses = [engine.step(batch, forward=_mean_loss).loss for _ in range(EPOCHS) for batch in batches]
    return {"weights": digest(model), "losses": losses}


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NoLoss(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class OwnBackward(Module):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class OwnTransfer(Module):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class MetricOnStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)


class Gathering(Module):
    """Gathers in each step that `stage` names."""

    def __init__(self, stage: str = "", collective: str = "all_gather") -> None:
        super().__init__()
        self.stage, self.collective = stage, collective

    def _gather(self, stage: str) -> None:
        if stage == self.stage:
            owner = self if self.collective == "all_gather" else self.trainer.strategy
            getattr(owner, self.collective)(*[torch.ones(())][: self.collective != "barrier"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._gather("fit")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._gather("validate")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._gather("test")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._gather("predict")
        return super().predict_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.all_gather(torch.ones(2))  # outside of a step

    def on_train_epoch_end(self) -> None:
        pass


class Iterator(Module):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(*next(dataloader_iter))


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(dataset(64))


def _code(module: Module, loader: Any, **options: Any) -> str:
    return refusal(lambda: _trainer(**{"max_epochs": 1, "max_steps": 1, **options}).fit(module, loader))[0]


def refusals() -> dict[str, str]:
    """Return the error codes of features that do not fit."""
    loader = _loaders()[0]
    return {
        "none": _code(Module(), loader),
        "registered": _code(Module(), loader, strategy="samestep"),
        "manual": _code(Manual(), loader, gradient_clip_val=None),
        "backward": _code(OwnBackward(), loader),
        "transfer": _code(OwnTransfer(), loader),
        "metric": _code(MetricOnStep(), loader),
        "dataloader_iter": _code(Iterator(), loader),
        "compile": _code(torch.compile(Module()), loader),  # type: ignore[arg-type]
        "no loss": _code(NoLoss(), loader),
        "averages": _code(Module(), loader, callbacks=[StochasticWeightAveraging(0.01, 0.5)], max_epochs=3),
        "accumulate": _code(Module(), loader, accumulate_grad_batches=2),
        "sync_batchnorm": _code(Module(), loader, sync_batchnorm=True),
        "loaders": _code(Module(), {"first": loader, "second": loader}),
        "batches": _code(Module(), list(loader)),
        "unbatched": _code(Module(), DataLoader(dataset(), batch_size=None)),
        "stream": _code(Module(), DataLoader(Stream(), batch_size=64)),
        "distributed": _code(
            Module(), DataLoader(dataset(), batch_size=64, sampler=torch.utils.data.DistributedSampler(dataset(), 2, 0))
        ),
        "precision": _code(Module(), loader, plugins=[MixedPrecision("16-mixed", "cpu")]),
    }


def collectives() -> dict[str, str]:
    """Return the error codes of steps with a collective."""
    stages = ["fit", "validate", "test", "predict"]
    cases = [("", "all_gather"), *((stage, "all_gather") for stage in stages)]
    cases += [("fit", name) for name in ("reduce", "broadcast", "barrier", "reduce_boolean_decision")]
    codes = {}
    for stage, name in cases:
        trainer = _trainer(max_epochs=1, max_steps=1, limit_val_batches=1)
        loaders = {"fit": _loaders()}.get(stage or "fit", (_loaders()[1],))
        codes[f"{stage} {name}"], _ = refusal(getattr(trainer, stage or "fit"), Gathering(stage, name), *loaders)
    return codes


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.rows: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        assert len(prediction) == len(indices)
        self.rows.append(indices)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.rows.append(indices)


def written() -> list[Any]:
    """Return the indices that a writer receives: of each batch, and of all batches of each loader."""
    writer = Writer()
    trainer = _trainer(callbacks=[writer])
    for _ in range(2):
        trainer.predict(Module(), DataLoader(dataset(50), batch_size=20))
    return writer.rows


def other_batches(folder: str) -> str:
    """Return the code of a resumption with another global batch size."""
    strategy = SamestepStrategy(global_batch_size=32, microbatches=MICROBATCHES, seed=SEED)
    path = str(Path(folder) / "saved.ckpt")
    return refusal(_trainer(strategy=strategy).fit, Module(), *_loaders(), ckpt_path=path)[0]


def mixed() -> str:
    """Train in bfloat16, with a sampler, workers and a last batch that is left out; return the digest."""
    module, data = Module(), dataset(300)
    weights = torch.linspace(1, 2, len(data))
    sampler = torch.utils.data.WeightedRandomSampler(weights, 200)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=30, sampler=sampler, num_workers=1, drop_last=True)
    _trainer(max_epochs=2, precision="bf16-mixed").fit(module, loader)
    assert len(module.steps) == 12
    return digest(module.net)


def missing_names() -> list[str]:
    """Return the private names of Lightning that the adapter needs and that do not exist."""
    trainer, module = _trainer(), Module()
    loader = _update_dataloader(_loaders()[1], SequentialSampler(dataset(203)), RunningStage.PREDICTING)
    trainer.strategy.connect(module)
    metric = MulticlassAccuracy(CLASSES)
    owners = {
        "use_distributed_sampler": trainer._accelerator_connector,
        "_load_combined_loader_states": trainer.fit_loop,
        "_sigterm_notifier_fn": trainer._signal_connector,
        "_slurm_sigusr_handler_fn": trainer._signal_connector,
        "received_sigterm": trainer._signal_connector,
        "_results": trainer.fit_loop.epoch_loop,
        "_defaults": metric,
        "_reductions": metric,
        "_layer_sync": trainer.strategy,
        "_compiler_ctx": module,
        "_batch_sampler": loader.batch_sampler,
        "_sync_module_states": distributed,
        "_IndexBatchSamplerWrapper": distributed,
    }
    missing = [] if hasattr(trainer, "_results") else ["_results"]
    missing += [name for name, owner in owners.items() if not hasattr(owner, name)]
    signature = inspect.signature(lightning.LightningModule.log).parameters
    missing += {"should_sync"} - set(inspect.signature(metric.sync).parameters)
    if hasattr(lightning.pytorch.callbacks, "EMAWeightAveraging"):  # since 2.6
        missing += {"_val_check_time_interval"} - vars(trainer).keys()
    return missing + [name for name in ("name", "value", "batch_size", "reduce_fx", "on_step") if name not in signature]
