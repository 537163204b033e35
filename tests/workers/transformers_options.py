"""Arguments of the trainer of Transformers, each in a short training, and refused arguments, classes and launches.

On the ranks of `helpers.forked_ranks`.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch.utils.data import IterableDataset

from helpers.forked_ranks import refusal
from samestep.integrations.accelerate_options import require_replication
from samestep.integrations.transformers import SamestepTrainerMixin, Trainer
from workers.transformers_training import MICROBATCHES, digest, model, padded, rows, trainer

Options = dict[str, Any]

# Same bits on any number of processes.
WORKS: dict[str, Options] = {
    "bf16": {"bf16": True},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "dataloader_drop_last": {"dataloader_drop_last": True, "max_steps": 7},  # with six batches in an epoch
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5.0},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "best_model": {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    | {"load_best_model_at_end": True},
    "average_tokens": {"average_tokens_across_devices": False},
    "eval_lists": {"eval_do_concat_batches": False, "eval_accumulation_steps": 1, "prediction_loss_only": True},
    "optimizer": {"optim": "adafactor", "lr_scheduler_type": "linear"},
    "no_clipping": {"max_grad_norm": 0},
    "workers": {"dataloader_num_workers": 1},
    "schedule": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2},
}
# Refused by name.
REFUSED: dict[str, Options] = {
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "fp16": {"fp16": True},
    "torch_compile": {"torch_compile": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 1},
    "batch_eval_metrics": {"batch_eval_metrics": True},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": "all"},
    "include_for_metrics": {"include_for_metrics": ["inputs"]},
    "include_for_metrics loss": {"include_for_metrics": ["loss"]},
    "train_sampling_strategy": {"train_sampling_strategy": "batch_rebalance"},
    "ignore_data_skip": {"ignore_data_skip": True},
    "ddp_find_unused_parameters": {"ddp_find_unused_parameters": True},
    "ddp_bucket_cap_mb": {"ddp_bucket_cap_mb": 10},
    "ddp_broadcast_buffers": {"ddp_broadcast_buffers": True},
    "ddp_static_graph": {"ddp_static_graph": True},
    "dataloader_in_order": {"dataloader_in_order": False},
    "accelerator_config": {"accelerator_config": {"split_batches": True}},
    "num_steps": {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    "optim": {"optim": "lomo"},
    "multiprocessing_context": {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"},
}


def _train(folder: str, options: Options) -> list[Any]:
    instance = trainer(folder, **{"max_steps": 4, **options})
    if instance.args.prediction_loss_only:
        instance.compute_metrics = None
    instance.train()
    evaluated = instance.evaluate()
    names = [name for name in ("eval_loss", "eval_accuracy", "eval_tokens") if name in evaluated]
    return [digest(instance.model), [evaluated[name] for name in names]]


def works(folder: str) -> dict[str, list[Any]]:
    """Return weights and evaluation of each supported option."""
    return {name: _train(str(Path(folder, name)), options) for name, options in WORKS.items()}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


def _stream(folder: str) -> None:
    arguments = transformers.TrainingArguments(folder, max_steps=1, report_to=[], use_cpu=True)
    sizes = {"global_batch_size": 32, "microbatches": MICROBATCHES}
    Trainer(model=model(), args=arguments, data_collator=padded, train_dataset=Stream(), **sizes).train()


def _refusal(folder: str, **options: Any) -> list[str]:
    return refusal(lambda: trainer(folder, max_steps=1, **options).train())


def _refusal_in(folder: str, **variables: str) -> list[str]:
    """Return the refusal with environment variables of `accelerate launch`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(variables)
    try:
        return _refusal(folder)
    finally:
        for name in variables:
            del os.environ[name]
        AcceleratorState._reset_state(reset_partial_state=True)


def _refusal_of_type(kind: DistributedType) -> list[str]:
    """Return the refusal of an accelerator whose launch has selected a kind of parallelism, which needs GPUs."""
    device = torch.device("cpu")
    state: Any = SimpleNamespace(distributed_type=kind, device=device, dynamo_plugin=TorchDynamoPlugin())
    return refusal(require_replication, state)


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


def _seeded_collation(folder: str) -> list[str]:
    instance = trainer(folder, max_steps=1)
    instance.data_collator = _SeededCollator()
    return refusal(instance.train)


class _OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(rows(), batch_size=8, collate_fn=padded)  # type: ignore[arg-type]


def refusals(folder: str) -> dict[str, dict[str, list[str]]]:
    """Return code and text of the error of each refused option; of classes and launches."""
    named = {name: _refusal(folder, **options) for name, options in REFUSED.items()}
    others = {
        "none": _refusal(folder),
        "by length": _refusal(folder, train_sampling_strategy="group_by_length"),
        "loader": _refusal(folder, kind=_OwnLoader),
        "step of a base class": _refusal(folder, kind=_with_method("training_step", is_base=True)),
        "batches of a base class": _refusal(folder, kind=_with_method("get_batch_samples", is_base=True)),
        "items of a base class": _refusal(folder, kind=_with_method("_get_num_items_in_batch", is_base=True)),
        "items of a subclass": _refusal(folder, kind=_with_method("_get_num_items_in_batch", is_base=False)),
        "seeded collation": _seeded_collation(folder),
        "stream": refusal(_stream, folder),
        "fp16 of a launch": _refusal_in(folder, ACCELERATE_MIXED_PRECISION="fp16"),
        "compilation of a launch": _refusal_in(folder, ACCELERATE_DYNAMO_BACKEND="INDUCTOR"),
        "FSDP of a launch": _refusal_of_type(DistributedType.FSDP),
        "DeepSpeed of a launch": _refusal_of_type(DistributedType.DEEPSPEED),
        "parallelism of a launch": _refusal_in(folder, ACCELERATE_USE_PARALLELISM_CONFIG="true"),
    }
    return {"named": named, "others": others}


def lora(folder: str) -> dict[str, Any]:
    """Train adapters of PEFT, and resume from a checkpoint of them; return the values that must be equal."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])

    def net() -> Any:
        base = model()
        torch.manual_seed(2)
        return peft.get_peft_model(base, config)

    whole = trainer(folder, net=net(), max_steps=6, save_strategy="steps", save_steps=4)
    whole.train()
    resumed = trainer(folder, net=net(), max_steps=6)
    resumed.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-4"))
    saved = sorted(path.name for path in (Path(folder) / "checkpoint-4").iterdir() if "adapter" in path.name)
    evaluated = whole.evaluate()
    return {
        "weights": digest(whole.model),
        "resumed": digest(resumed.model),
        "saved": saved,
        "trained": sum(parameter.numel() for parameter in whole.model.parameters() if parameter.requires_grad),
        "evaluated": [evaluated["eval_loss"], evaluated["eval_tokens"]],
    }


def sft(folder: str) -> dict[str, Any]:
    """Fine-tune with the trainer of TRL on texts and completions; return the values that must be equal."""
    import trl
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    class SFTTrainer(SamestepTrainerMixin, trl.SFTTrainer):
        """The trainer of TRL with steps of global batches."""

    def tokenizer() -> PreTrainedTokenizerFast:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(30))])}
        base = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        base.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

    texts = [" ".join(str(token % 30) for token in row["input_ids"]) for row in rows(61)]
    data = Dataset.from_list([{"prompt": text[:6], "completion": text[6:]} for text in texts])
    arguments = trl.SFTConfig(
        folder,
        max_steps=5,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        max_length=32,
        per_device_eval_batch_size=5,
        learning_rate=0.01,
    )
    instance = SFTTrainer(
        model=model(),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(),
        global_batch_size=16,
        microbatches=4,
    )
    instance.train()
    evaluated = instance.evaluate()
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    history = [
        {name: entry[name] for name in names if name in entry}
        for entry in instance.state.log_history
        if "grad_norm" in entry
    ]
    kept = {name: value for name, value in evaluated.items() if "second" not in name and "time" not in name}
    return {"weights": digest(instance.model), "history": history, "evaluated": kept}
