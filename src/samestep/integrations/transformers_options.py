"""Training arguments and classes of trainers that do not fit the steps of a global batch."""

from __future__ import annotations

from typing import Any

import transformers

from samestep.integrations.torch_loader import integration_error, refuse

_NO_DDP = "leave it out: there is no DDP, gradients are reduced in a fixed order"
_NO_SHARDING = "leave it out: samestep.Engine shards models"
_LOADING = "leave it out: each process loads its own microbatches"
# Their updates are hooks of the backward, and so one per microbatch.
_UPDATES_IN_BACKWARD = (
    *("lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise"),
    *("galore_adafactor_layerwise", "apollo_adamw_layerwise"),
)
# Their `training_step` only enters a context, which the step of a global batch enters too.
_OFFLOADING_TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")


def require_supported_class(kind: type, mixin: type) -> None:
    """Refuse a trainer with methods of a step that `mixin` replaces."""
    classes = kind.__mro__
    first, last = classes.index(mixin), classes.index(transformers.Trainer)
    own, bases = classes[:first], classes[first + 1 : last]
    replaced = {"training_step": bases, "get_batch_samples": bases, "_get_num_items_in_batch": (*own, *bases)}
    for name, owner in ((name, owner) for name, owners in replaced.items() for owner in owners if name in vars(owner)):
        is_of_trl = owner.__module__.startswith("trl.") and owner.__name__ in _OFFLOADING_TRAINERS
        if not (is_of_trl and name == "training_step"):
            raise integration_error(
                f"{owner.__name__}.{name}, which a step of a global batch does not call",
                "override compute_loss; and count_items for a mean over something else than samples or labels",
            )


def require_supported_arguments(args: transformers.TrainingArguments) -> None:
    """Refuse arguments that do not fit the steps of a global batch."""
    accelerator: Any = args.accelerator_config
    accumulation = accelerator.gradient_accumulation_kwargs or {}
    reasons = {
        "gradient_accumulation_steps": (args.gradient_accumulation_steps != 1, "use global_batch_size=..."),
        "fp16": (args.fp16, "use bf16=True"),
        # Also of `accelerate launch --mixed_precision`.
        "mixed_precision": (args.mixed_precision not in ("no", "bf16"), "use bf16"),
        "fsdp": (bool(args.fsdp), _NO_SHARDING),
        "deepspeed": (args.deepspeed is not None, _NO_SHARDING),
        "parallelism_config": (args.parallelism_config is not None, _NO_SHARDING),
        "torch_compile": (bool(args.torch_compile), "use a model that is not compiled"),
        "optim": (args.optim in _UPDATES_IN_BACKWARD, 'use optim="adamw_torch", or another optimizer with step()'),
        "auto_find_batch_size": (args.auto_find_batch_size, "use more microbatches"),
        "torch_empty_cache_steps": (args.torch_empty_cache_steps is not None, "use more microbatches"),
        "batch_eval_metrics": (args.batch_eval_metrics, "use compute_metrics of all predictions"),
        "include_num_input_tokens_seen": (args.include_num_input_tokens_seen != "no", 'use the default "no"'),
        "include_for_metrics": (
            not {"inputs", "loss"}.isdisjoint(args.include_for_metrics),
            "use predictions and labels",
        ),
        "train_sampling_strategy": (args.train_sampling_strategy == "batch_rebalance", 'use "group_by_length"'),
        "ignore_data_skip": (args.ignore_data_skip, "leave it out: a resumption begins at the saved position"),
        "ddp_find_unused_parameters": (bool(args.ddp_find_unused_parameters), "freeze parameters without a gradient"),
        "ddp_bucket_cap_mb": (args.ddp_bucket_cap_mb is not None, _NO_DDP),
        "ddp_broadcast_buffers": (args.ddp_broadcast_buffers is not None, "use buffers= of the trainer"),
        "ddp_static_graph": (bool(args.ddp_static_graph), _NO_DDP),
        "dataloader_in_order": (not args.dataloader_in_order, _LOADING),
        "accelerator_config": (
            accumulation.get("num_steps", 1) != 1 or accelerator.split_batches or bool(accelerator.dispatch_batches),
            "leave out num_steps, split_batches and dispatch_batches: use global_batch_size=... and microbatches",
        ),
    }
    values = ((name, getattr(args, name), *reason) for name, reason in reasons.items())
    refuse({f"TrainingArguments({name}={value!r})": (is_set, fix) for name, value, is_set, fix in values})
    fix = f"torchrun --nproc-per-node {args.n_gpu} script.py"
    refuse({f"one process with {args.n_gpu} GPUs": (args.n_gpu > 1, fix)})
