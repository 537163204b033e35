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
from samestep.errors import InputError
from samestep.integrations.torch_loader import integration_error

_PLUGINS = (
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin"),
    *("parallelism_config", "dynamo_backend", "dynamo_plugin", "gradient_accumulation_plugin"),
)
_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def require_supported_options(options: Mapping[str, Any]) -> None:
    """Refuse plugins and other parallelism than replication.

    Raises:
        InputError: there is such an option.
    """
    for name in _PLUGINS:
        if options.get(name) is not None:
            raise _unsupported(name)


def require_supported_state(accelerator: accelerate.Accelerator) -> None:
    """Refuse options, and settings of the environment or of `accelerate config`, that a new accelerator has.

    Raises:
        InputError: there is one.
    """
    require_replication(accelerator.state)
    require_no_accumulation(accelerator.gradient_accumulation_steps)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise _unsupported(f"mixed_precision={accelerator.mixed_precision!r}", "bf16, or no mixed precision")
    loading = accelerator.dataloader_config
    refused = {
        "dispatch_batches": bool(loading.dispatch_batches),
        "split_batches": loading.split_batches,
        "data_seed": loading.data_seed is not None,
    }
    for name in (name for name, is_set in refused.items() if is_set):
        raise _unsupported(f"DataLoaderConfiguration({name}=...)")
    if accelerator.ddp_handler is not None:
        raise _unsupported("DistributedDataParallelKwargs", "no DDP: gradients are reduced in a fixed order")
    if not accelerator.device_placement:
        raise _unsupported("device_placement=False")


def require_replication(state: accelerate.state.AcceleratorState) -> None:
    """Refuse other parallelism than replication, and compilation, also from the environment or `accelerate config`.

    Raises:
        InputError: there is one.
    """
    if state.distributed_type not in _TYPES or state.device.type not in ("cpu", "cuda"):
        raise _unsupported(f"distributed_type={state.distributed_type.value} on {state.device.type}")
    if state.dynamo_plugin.backend != DynamoBackend.NO:
        raise _unsupported(f"dynamo_backend={state.dynamo_plugin.backend.value}")
    if getattr(state, "parallelism_config", None) is not None:
        raise _unsupported("parallelism_config")


def require_no_accumulation(steps: int) -> None:
    """Refuse accumulation of gradients over batches.

    Raises:
        InputError: there are several batches.
    """
    if steps != 1:
        raise integration_error(
            f"gradient_accumulation_steps={steps}",
            "a global batch of all samples of an optimizer step; microbatches bound the memory",
            "global_batch_size= with all samples of a step, and gradient_accumulation_steps=1",
        )


def require_same_ranks(accelerator: accelerate.Accelerator, world: World) -> None:
    """Refuse another rank or number of processes in Accelerate than in the world.

    Raises:
        InputError: they differ.
    """
    if (accelerator.process_index, accelerator.num_processes) != (world.rank, world.size):
        raise integration_error(
            f"Accelerate is process {accelerator.process_index} of {accelerator.num_processes}, and the world has rank "
            f"{world.rank} of {world.size}",
            "one launcher for both",
            "start the script with samestep run, accelerate launch or torchrun",
        )


def require_placement(device_placement: bool | None, name: str) -> None:
    """Refuse `device_placement=False` for an object.

    Raises:
        InputError: there is such an option.
    """
    if device_placement is False:
        raise _unsupported(f"device_placement=False for {name}", "data and trained model on the device of the process")


def _unsupported(feature: str, expected: str = "replication of the model, one microbatch after another") -> InputError:
    return integration_error(
        f"Accelerate with {feature}",
        expected,
        "remove the option; samestep.Engine supports FSDP, compilation, fp16 and other strategies",
    )


class ScheduleCheck:
    """Check that no scheduler makes a step within a global batch.

    A scheduler that makes one per microbatch can change the rate between two batches only, so steps are compared too.

    Args:
        optimizers: the optimizers; their schedulers, prepared or not, exist already.
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
        """Compare steps and rates with those at the beginning of the global batch.

        Raises:
            InputError: they have changed.
        """
        if self._read() != self._before:
            raise integration_error(
                "a scheduler made a step, or the learning rate changed, within a global batch",
                "one step of a scheduler per optimizer step; the body of the loop runs once per microbatch",
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
