"""Options of Accelerate, and schedules, that do not fit the steps of a global batch."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.distributed.world import World
from samestep.integrations.torch_loader import integration_error, refuse

_PLUGINS = (
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin"),
    *("parallelism_config", "dynamo_backend", "dynamo_plugin", "gradient_accumulation_plugin"),
)
_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_REMOVE = "remove the option; samestep.Engine supports FSDP, compilation, fp16 and other strategies"


def require_supported_options(options: Mapping[str, Any]) -> None:
    """Refuse plugins and other parallelism than replication, as an `InputError`."""
    refuse({name: (options.get(name) is not None, _REMOVE) for name in _PLUGINS})


def require_supported_state(accelerator: accelerate.Accelerator, world: World) -> None:
    """Refuse options, settings of `accelerate config`, and other ranks than those of the world."""
    loading, ranks = accelerator.dataloader_config, (accelerator.process_index, accelerator.num_processes)
    require_no_accumulation(accelerator.gradient_accumulation_steps)
    refuse(
        {
            f"mixed_precision={accelerator.mixed_precision!r}": (
                accelerator.mixed_precision not in ("no", "bf16"),
                "bf16, or no mixed precision",
            ),
            "DataLoaderConfiguration(dispatch_batches=...)": (bool(loading.dispatch_batches), _REMOVE),
            "DataLoaderConfiguration(split_batches=...)": (loading.split_batches, _REMOVE),
            "DataLoaderConfiguration(data_seed=...)": (loading.data_seed is not None, _REMOVE),
            "DistributedDataParallelKwargs": (accelerator.ddp_handler is not None, _REMOVE),
            "device_placement=False": (not accelerator.device_placement, _REMOVE),
            f"rank and number of processes are {ranks}, in the world {(world.rank, world.size)}": (
                ranks != (world.rank, world.size),
                "start the script with samestep run, accelerate launch or torchrun",
            ),
        }
    )


def require_replication(state: accelerate.state.AcceleratorState) -> None:
    """Refuse other parallelism than replication, and compilation, also from the environment or `accelerate config`."""
    is_replicated = state.distributed_type in _TYPES and state.device.type in ("cpu", "cuda")
    refuse(
        {
            f"distributed_type={state.distributed_type.value} on {state.device.type}": (not is_replicated, _REMOVE),
            "dynamo_backend": (state.dynamo_plugin.backend != DynamoBackend.NO, _REMOVE),
            "parallelism_config": (getattr(state, "parallelism_config", None) is not None, _REMOVE),
        }
    )


def require_no_accumulation(steps: int) -> None:
    """Refuse accumulation of gradients over batches, as an `InputError`."""
    fix = "global_batch_size= with all samples of a step, and gradient_accumulation_steps=1"
    refuse({f"gradient_accumulation_steps={steps}": (steps != 1, fix)})


def require_placement(device_placement: bool | None) -> None:
    """Refuse `device_placement=False` for an object, as an `InputError`."""
    refuse({"device_placement=False": (device_placement is False, _REMOVE)})


class ScheduleCheck:
    """Check that no scheduler makes a step within a global batch.

    A scheduler that makes one per microbatch can change the rate between two batches only, so steps are compared too.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers, own = optimizers, {id(optimizer) for optimizer in optimizers}
        # An optimizer has no list of its schedulers.
        schedulers = [item for item in gc.get_objects() if issubclass(type(item), LRScheduler)]
        self._schedulers = [scheduler for scheduler in schedulers if id(_optimizer_of(scheduler)) in own]
        self._before: list[Any] = []

    def begin(self) -> None:
        """Record steps and rates at the beginning of a global batch."""
        self._before = self._read()

    def require_unchanged(self) -> None:
        """Compare steps and rates with those at the beginning of the global batch."""
        if self._read() != self._before:
            raise integration_error(
                "a step of a scheduler, or another learning rate, within a global batch",
                "prepare the scheduler, or step it `if accelerator.sync_gradients:`",
            )

    def _read(self) -> list[Any]:
        return [*learning_rates(self._optimizers), *(scheduler.last_epoch for scheduler in self._schedulers)]


def learning_rates(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return the learning rate of each group of parameters; None for a group without one, as of Adafactor."""
    return [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]


def _optimizer_of(scheduler: LRScheduler) -> Optimizer | None:
    optimizer: Optimizer | None = getattr(scheduler, "optimizer", None)
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
