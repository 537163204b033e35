"""Private names of other libraries that the adapters use, with the parameters that they pass."""

import importlib
import inspect
import warnings
from importlib.util import find_spec
from typing import Any

warnings.filterwarnings("ignore")

# Object, and parameters that it must have.
ACCELERATE: dict[str, tuple[str, ...]] = {
    "accelerate.accelerator:Accelerator._do_sync": (),
    "accelerate.accelerator:Accelerator._prepare_one": ("obj", "first_pass", "device_placement"),
    "accelerate.accelerator:Accelerator.prepare_model": ("model", "device_placement", "evaluation_mode"),
    "accelerate.accelerator:Accelerator.prepare_data_loader": ("data_loader", "device_placement"),
    "accelerate.accelerator:Accelerator.prepare_optimizer": ("optimizer", "device_placement"),
    "accelerate.accelerator:Accelerator.prepare_scheduler": ("scheduler",),
    "accelerate.accelerator:Accelerator.save_state": ("output_dir", "safe_serialization"),
    "accelerate.accelerator:Accelerator.load_state": ("input_dir", "load_kwargs"),
    "accelerate.accelerator:Accelerator.gather_for_metrics": ("input_data", "use_gather_object"),
    "accelerate.accelerator:Accelerator.reduce": ("tensor", "reduction", "scale"),
    "accelerate.optimizer:AcceleratedOptimizer.step": (),
    "accelerate.scheduler:AcceleratedScheduler.step": (),
}
LIGHTNING: dict[str, tuple[str, ...]] = {
    "lightning.pytorch.overrides.distributed:_IndexBatchSamplerWrapper": (),
    "lightning.pytorch.overrides.distributed:_sync_module_states": ("module",),
    "lightning.pytorch.strategies:DDPStrategy.setup_environment": (),
    "lightning.pytorch.strategies:DDPStrategy.configure_ddp": (),
    "lightning.pytorch.strategies:DDPStrategy.reduce": ("tensor", "group", "reduce_op"),
    "lightning.pytorch.strategies:DDPStrategy.process_dataloader": ("dataloader",),
    "lightning.pytorch.strategies:DDPStrategy.batch_to_device": ("batch", "device", "dataloader_idx"),
    "lightning.pytorch.strategies:DDPStrategy.backward": ("closure_loss", "optimizer"),
    "lightning.pytorch.strategies:DDPStrategy.on_exception": ("exception",),
    "lightning.pytorch:LightningModule.log": ("name", "value", "batch_size", "reduce_fx", "on_step", "on_epoch"),
    "lightning.pytorch.utilities.model_helpers:is_overridden": ("method_name", "instance"),
}
TRANSFORMERS: dict[str, tuple[str, ...]] = {
    "transformers:Trainer.create_accelerator_and_postprocess": (),
    "transformers:Trainer.get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "transformers:Trainer.training_step": ("model", "inputs", "num_items_in_batch"),
    "transformers:Trainer.prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "transformers:Trainer.compute_loss": ("model", "inputs", "num_items_in_batch"),
    "transformers:Trainer.compute_loss_context_manager": (),
    "transformers:Trainer.get_total_train_batch_size": ("args",),
    "transformers:Trainer.evaluation_loop": ("dataloader", "prediction_loss_only", "metric_key_prefix"),
    "transformers:Trainer.num_examples": ("dataloader",),
    "transformers:Trainer.floating_point_ops": ("inputs",),
    "transformers:Trainer._prepare_inputs": ("inputs",),
    "transformers.trainer_callback:ExportableState.state": (),
}
TRL = {"trl:SFTTrainer.compute_loss": ("model", "inputs", "num_items_in_batch")}
# Attributes that are not names of a class, in the source of an object.
SOURCES: dict[str, tuple[str, ...]] = {
    "accelerate.accelerator:Accelerator.accumulate": ("_do_sync",),
    "accelerate.accelerator:Accelerator.free_memory": ("self._models",),
    "accelerate.scheduler:AcceleratedScheduler.step": ("split_batches", "sync_gradients"),
    "transformers:Trainer": (
        *("_tr_loss", "_loss_shifts_labels", "model_accepts_loss_kwargs", "skip_first_batches", "gather_function"),
        "_train_batch_size",
    ),
    "lightning.pytorch.trainer.connectors.accelerator_connector:_AcceleratorConnector": ("use_distributed_sampler",),
    "lightning.pytorch:LightningModule": ("_compiler_ctx",),
    "lightning.pytorch.strategies:DDPStrategy": ("_layer_sync",),
}
TRL_SOURCES = {"trl:SFTTrainer": ("_total_train_tokens", "_metrics", "gather_for_metrics", "num_tokens")}


def _object(name: str) -> Any:
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def missing() -> list[str]:
    """Return the names that have moved, with the missing parameter or attribute."""
    moved = []
    has_trl = find_spec("trl") is not None
    for name, parameters in (ACCELERATE | LIGHTNING | TRANSFORMERS | (TRL if has_trl else {})).items():
        try:
            value = _object(name)
        except (AttributeError, ImportError):
            moved.append(name)
            continue
        existing = inspect.signature(value).parameters
        moved += [f"{name}({parameter})" for parameter in parameters if parameter not in existing]
    for name, texts in (SOURCES | (TRL_SOURCES if has_trl else {})).items():
        source = inspect.getsource(_object(name))
        moved += [f"{name}: {text}" for text in texts if text not in source]
    return moved


def versions() -> dict[str, str]:
    """Return the installed versions."""
    return {name: importlib.import_module(name).__version__ for name in ("accelerate", "lightning", "transformers")}
