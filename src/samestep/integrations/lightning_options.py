"""Features of modules and trainers of Lightning that do not fit the steps of a global batch."""

from __future__ import annotations

import inspect

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from samestep.engine.batch_norm_checks import uses_batch_statistics
from samestep.integrations.torch_loader import refuse

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_LARGER_BATCH = "a larger global batch size, and as many more microbatches, which are accumulated"


def require_supported(module: LightningModule, trainer: Trainer, precision: Precision) -> None:
    """Refuse features that do not fit a training or an evaluation, as an `InputError`."""
    owners = filter(None, (module, trainer.datamodule))  # type: ignore[attr-defined]
    has_scaler = getattr(precision, "scaler", None) is not None
    refuse(
        {
            "on_before_batch_transfer is overridden": (
                any(is_overridden("on_before_batch_transfer", owner) for owner in owners),
                "on_after_batch_transfer, or the collate function of the DataLoader",
            ),
            "a step with the argument dataloader_iter": (
                any("dataloader_iter" in inspect.signature(getattr(module, name)).parameters for name in _STEPS),
                "training_step(self, batch, batch_idx)",
            ),
            f"the precision plugin {type(precision).__name__} {precision.precision}": (
                type(precision) not in _PRECISIONS or has_scaler,
                'Trainer(precision="bf16-mixed"), or another precision without a loss scaler',
            ),
        }
    )


def require_supported_training(module: LightningModule, trainer: Trainer, *, has_layer_sync: bool) -> None:
    """Refuse features that do not fit a training, as an `InputError`."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    averages = any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks)
    accumulates = any(
        isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches()
        for callback in callbacks
    )
    refuse(
        {
            "sync_batchnorm=True": (has_layer_sync, "microbatches of 16 samples or more"),
            "StochasticWeightAveraging of a module with batch norm": (
                averages and uses_batch_statistics(module),
                "a module without batch norm, or the callback WeightAveraging of Lightning 2.6",
            ),
            "automatic_optimization=False": (
                not module.automatic_optimization,
                "samestep.Engine in a loop of your own: docs/start/own-loop.md",
            ),
            "LightningModule.backward is overridden": (
                is_overridden("backward", module),
                "a loss with the gradient that you need, or on_after_backward",
            ),
            "torch.compile(module)": (module._compiler_ctx is not None, "trainer.fit(module), without torch.compile"),
            "a val_check_interval in seconds": (
                getattr(trainer, "_val_check_time_interval", None) is not None,  # since 2.6
                "Trainer(val_check_interval=500), a number of global batches, or 0.25, a part of an epoch",
            ),
            "GradientAccumulationScheduler": (accumulates, _LARGER_BATCH),
        }
    )
    require_one_batch_per_step(trainer)


def require_one_batch_per_step(trainer: Trainer) -> None:
    """Refuse accumulation of gradients over batches, as an `InputError`."""
    number = trainer.accumulate_grad_batches
    refuse({f"accumulate_grad_batches={number}": (number != 1, _LARGER_BATCH)})
