"""Features of modules and trainers of Lightning that do not fit the steps of a global batch."""

from __future__ import annotations

import inspect

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from samestep.engine.batch_norm_checks import uses_batch_statistics
from samestep.errors import InputError
from samestep.integrations.torch_loader import integration_error

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def require_supported(module: LightningModule, trainer: Trainer, precision: Precision) -> None:
    """Refuse features that do not fit a training or an evaluation.

    Raises:
        InputError: there is one.
    """
    owners = filter(None, (module, trainer.datamodule))  # type: ignore[attr-defined]
    if any(is_overridden("on_before_batch_transfer", owner) for owner in owners):
        raise integration_error(
            "on_before_batch_transfer is overridden",
            "each microbatch is transferred when it is computed",
            "on_after_batch_transfer, or the collate function of the DataLoader",
        )
    for name in _STEPS:
        if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
            raise integration_error(
                f"{name} with the argument dataloader_iter",
                "a step that receives one batch",
                f"{name}(self, batch, batch_idx)",
            )
    if type(precision) not in _PRECISIONS or getattr(precision, "scaler", None) is not None:
        raise integration_error(
            f"the precision plugin {type(precision).__name__} {precision.precision}",
            "a precision without a loss scaler: 32-true, 64-true, bf16-true, 16-true or bf16-mixed",
            'Trainer(precision="bf16-mixed")',
        )


def require_supported_training(module: LightningModule, trainer: Trainer, *, has_layer_sync: bool) -> None:
    """Refuse features that do not fit a training.

    Raises:
        InputError: there is one.
    """
    if has_layer_sync:
        raise integration_error(
            "sync_batchnorm=True",
            "batch norm with the statistics of a microbatch, which do not depend on the number of processes",
            "leave out sync_batchnorm, and choose microbatches of 16 samples or more",
        )
    averages = any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if averages and uses_batch_statistics(module):
        raise integration_error(
            "StochasticWeightAveraging of a module with batch norm",
            "steps of global batches; the callback computes statistics in a further epoch without steps",
            "a module without batch norm, or the callback WeightAveraging of Lightning 2.6",
        )
    if not module.automatic_optimization:
        raise integration_error(
            "automatic_optimization=False",
            "one optimizer, which Lightning steps once per global batch",
            "samestep.Engine in a loop of your own: docs/start/own-loop.md",
        )
    if is_overridden("backward", module):
        raise integration_error(
            "LightningModule.backward is overridden",
            "the gradient of the loss of each microbatch, which the strategy computes",
            "a loss with the gradient that you need; on_after_backward receives the gradients of the global batch",
        )
    if module._compiler_ctx is not None:
        raise integration_error(
            "torch.compile(module) of a whole LightningModule",
            "kernels that do not depend on the sizes of microbatches that a rank has computed before",
            "trainer.fit(module), without torch.compile",
        )
    if (seconds := getattr(trainer, "_val_check_time_interval", None)) is not None:  # since 2.6
        raise integration_error(
            f"a val_check_interval of {seconds:g} seconds",
            "validation after a number of batches: each rank reads a clock of its own",
            "Trainer(val_check_interval=500), a number of global batches, or 0.25, a part of an epoch",
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            largest = max(callback.scheduling.values())
            raise _accumulation_error(f"GradientAccumulationScheduler({callback.scheduling})", largest)
    require_one_batch_per_step(trainer)


def require_one_batch_per_step(trainer: Trainer) -> None:
    """Refuse accumulation of gradients over batches.

    Raises:
        InputError: the trainer accumulates.
    """
    number = trainer.accumulate_grad_batches
    if number != 1:
        raise _accumulation_error(f"accumulate_grad_batches={number}", number)


def _accumulation_error(value: str, batches: int) -> InputError:
    return integration_error(
        value,
        "one optimizer step per global batch, whose microbatches are accumulated",
        f"a global batch size {batches} times as large, and as many more microbatches",
    )
