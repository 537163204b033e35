"""Options of Accelerate that do not fit the steps of a global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import accelerate
from accelerate.utils import DistributedType, DynamoBackend

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
