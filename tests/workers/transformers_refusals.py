"""Arguments, classes and launches that the trainer of Samestep refuses, on the ranks of `helpers.forked_ranks`."""

import os
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, TorchDynamoPlugin

from samestep.integrations.accelerate_options import require_replication
from samestep.integrations.transformers import SamestepTrainerMixin, Trainer
from workers.transformers_training import code_of, padded, rows, trainer


def _code(folder: str, **options: Any) -> str:
    return code_of(lambda: trainer(folder, max_steps=1, **options).train())


def _code_in(folder: str, **variables: str) -> str:
    """Return the code with environment variables of `accelerate launch`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(variables)
    try:
        return _code(folder)
    finally:
        for name in variables:
            del os.environ[name]
        AcceleratorState._reset_state(reset_partial_state=True)


def _code_of_type(kind: DistributedType) -> str:
    """Return the code of an accelerator whose launch has selected a kind of parallelism, which needs GPUs."""
    device = torch.device("cpu")
    state: Any = SimpleNamespace(distributed_type=kind, device=device, dynamo_plugin=TorchDynamoPlugin())
    return code_of(lambda: require_replication(state))


def _with_method(name: str, *, is_base: bool) -> Any:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(transformers.Trainer, name)(self, *arguments, **options)

    owner = type("Owner", (transformers.Trainer if is_base else Trainer,), {name: method})
    return type("Own", (SamestepTrainerMixin, owner), {}) if is_base else owner


class _SeededCollator:
    seed, generator = None, None

    def __init__(self) -> None:
        self.seed = 42

    def __call__(self, samples: list[Any]) -> Any:
        return padded(samples)


def _seeded_collation(folder: str) -> str:
    instance = trainer(folder, max_steps=1)
    instance.data_collator = _SeededCollator()
    return code_of(instance.train)


class _OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(rows(), batch_size=8, collate_fn=padded)  # type: ignore[arg-type]


def refusals(folder: str) -> dict[str, str]:
    """Return the error codes of arguments that do not fit."""
    return {
        "none": _code(folder),
        "by length": _code(folder, train_sampling_strategy="group_by_length"),
        "accumulation": _code(folder, gradient_accumulation_steps=2),
        "rebalance": _code(folder, train_sampling_strategy="batch_rebalance"),
        "compile": _code(folder, torch_compile=True),
        "find": _code(folder, auto_find_batch_size=True),
        "tokens": _code(folder, include_num_input_tokens_seen="all"),
        "skip": _code(folder, ignore_data_skip=True),
        "loader": _code(folder, kind=_OwnLoader),
        "losses": _code(folder, include_for_metrics=["loss"]),
        "step of a base class": _code(folder, kind=_with_method("training_step", is_base=True)),
        "batches of a base class": _code(folder, kind=_with_method("get_batch_samples", is_base=True)),
        "items of a base class": _code(folder, kind=_with_method("_get_num_items_in_batch", is_base=True)),
        "items of a subclass": _code(folder, kind=_with_method("_get_num_items_in_batch", is_base=False)),
        "seeded collation": _seeded_collation(folder),
        "fp16 of a launch": _code_in(folder, ACCELERATE_MIXED_PRECISION="fp16"),
        "compilation of a launch": _code_in(folder, ACCELERATE_DYNAMO_BACKEND="INDUCTOR"),
        "FSDP of a launch": _code_of_type(DistributedType.FSDP),
        "DeepSpeed of a launch": _code_of_type(DistributedType.DEEPSPEED),
        "parallelism of a launch": _code_in(folder, ACCELERATE_USE_PARALLELISM_CONFIG="true"),
    }
