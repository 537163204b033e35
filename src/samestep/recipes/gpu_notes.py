"""Notes of a run on GPUs: memory of an epoch, and options of a step that use a GPU better."""

from __future__ import annotations

from typing import Any

import torch

from samestep.config import RecipeStep
from samestep.distributed.devices import gpu_memory, is_accelerator
from samestep.distributed.world import World, all_gather
from samestep.units import format_bytes


def memory_event(world: World) -> dict[str, Any] | None:
    """Return the event about memory of the rank with the highest peak since the start; a collective.

    Returns:
        `peak_bytes`, of tensors of the process; `other_bytes`, which no tensor can have, as
        connections of NCCL take; `total_bytes`, of the device; and `text`. None without GPUs.
    """
    memory = gpu_memory()
    if memory is None:
        return None
    peak, other, total = max(all_gather([memory.peak, memory.other, memory.total], world))
    text = f"GPU memory: peak {format_bytes(peak)} and {format_bytes(other)} for connections, of {format_bytes(total)}"
    return {"peak_bytes": peak, "other_bytes": other, "total_bytes": total, "text": text}


def gpu_hints(model: torch.nn.Module, step: RecipeStep, device: torch.device) -> list[str]:
    """Return hints at options with which most models are faster on a GPU; none on another device."""
    hints = []
    if is_accelerator(device) and step.precision == "fp32":
        hints.append(
            "hint: most models are faster on a GPU with step.precision: bf16, and need less memory"
        )
    has_convolutions = any(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    if is_accelerator(device) and has_convolutions and not step.channels_last:
        hints.append("hint: most convolutions are faster on a GPU with step.channels_last: true")
    return hints
