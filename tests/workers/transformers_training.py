"""Training with the trainer of Transformers, on the ranks of `helpers.forked_ranks`."""

import inspect
import json
import logging
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from helpers.forked_ranks import refusal
from helpers.models import digest
from samestep.integrations.transformers import SamestepTrainerMixin, Seq2SeqTrainer, Trainer

SAMPLES, BATCH, MICROBATCHES, VOCABULARY, SEED = 203, 32, 8, 40, 3
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
logging.disable(logging.WARNING)


def rows(samples: int = SAMPLES) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(samples)
    lengths = torch.randint(5, 30, (samples,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()} for length in lengths]


def padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)

    def filled(value: int, rest: int) -> torch.Tensor:
        rows = [[value or i for i in s["input_ids"]] + [rest] * (width - len(s["input_ids"])) for s in samples]
        return torch.tensor(rows)

    return {"input_ids": filled(0, 0), "attention_mask": filled(1, 0), "labels": filled(0, -100)}


def model() -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


def arguments(folder: str, **options: Any) -> transformers.TrainingArguments:
    defaults = {
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": SEED,
        "per_device_eval_batch_size": 5,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(folder, **{**defaults, **options})


def token_accuracy(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guesses == labels)[counted].mean()), "tokens": int(counted.sum())}


def trainer(
    folder: str,
    kind: Any = Trainer,
    batch: int = BATCH,
    net: Any = None,
    microbatches: Any = MICROBATCHES,
    **options: Any,
) -> Any:
    own: dict[str, Any] = {"global_batch_size": batch, "microbatches": microbatches, "run": Path(folder) / "run"}
    sizes = {} if kind is transformers.Trainer else own
    return kind(
        model=net or model(),
        args=arguments(folder, **options),
        data_collator=padded,
        train_dataset=rows(),
        eval_dataset=rows(57),
        compute_metrics=token_accuracy,
        **sizes,
    )


def _history(instance: Any) -> list[list[float]]:
    names = ("epoch", "loss", "grad_norm", "learning_rate")
    return [[entry[name] for name in names] for entry in instance.state.log_history if "grad_norm" in entry]


def train(folder: str, save_at: int | None = None, resume: bool = False) -> dict[str, Any]:
    """Train, or train from a checkpoint of the trainer in mid-epoch; return the values that must be equal."""
    options = {} if save_at is None else {"save_strategy": "steps", "save_steps": save_at}
    instance = trainer(folder, **options)
    if save_at is not None:
        instance.add_callback(_StopAt(save_at))
    instance.train(resume_from_checkpoint=True if resume else None)
    evaluated = instance.evaluate()
    kept = {name: value for name, value in evaluated.items() if "second" not in name and "time" not in name}
    tokens = sum(len(row["input_ids"]) - 1 for row in rows(57))
    return {"weights": digest(instance.model), "history": _history(instance), "evaluated": kept, "tokens": tokens}


class _StopAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def stock(folder: str) -> dict[str, Any]:
    """One step of the trainer of Transformers itself, on one process without dropout, and of Samestep's."""
    gradients = []
    for kind in (transformers.Trainer, Trainer):
        net = model()
        for module in net.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        options = {"max_steps": 1, "per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential"}
        instance = trainer(folder, kind, net=net, **options)
        instance.train()
        gradients.append(_history(instance)[0][1:3])
    return {"stock": gradients[0], "samestep": gradients[1]}


class _RequestStop(transformers.TrainerCallback):
    """Requests a stop on the last rank before a step, as a signal under `samestep run` does."""

    def __init__(self, owner: Any, step: int) -> None:
        self._owner, self._step = owner, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        world = self._owner._world
        if state.global_step == self._step and world.rank == world.size - 1:
            world.context.stop.number = signal.SIGTERM


def stop(folder: str) -> list[Any]:
    """Return the steps and checkpoints of a training that receives a stop request in the third step."""
    instance = trainer(folder, max_steps=6)
    instance.add_callback(_RequestStop(instance, 2))
    instance.train()
    return [instance.state.global_step, sorted(path.name for path in Path(folder).glob("checkpoint-*"))]


def restore(folder: str) -> dict[str, Any]:
    """Resume with the states of callbacks, and from a checkpoint of the trainer of Transformers; save after each."""
    restoring = {"restore_callback_states_from_checkpoint": True}

    def resumed(name: str, kind: Any = Trainer, save_at: int = 2, **options: Any) -> Any:
        place = str(Path(folder) / name)
        instance = trainer(place, kind, max_steps=save_at, save_strategy="steps", save_steps=save_at, **options)
        return instance, Path(place)

    def settings(place: Path, step: int) -> Any:
        state = json.loads((place / f"checkpoint-{step}" / "trainer_state.json").read_text(encoding="utf-8"))
        return state["stateful_callbacks"]["SamestepCallback"]["attributes"]["settings"]

    first, place = resumed("own")
    first.train()
    second, _ = resumed("own", save_at=4, **restoring)
    second.train(resume_from_checkpoint=True)
    changed, _ = resumed("own", save_at=6, batch=16, **restoring)
    plain, plain_place = resumed("plain", transformers.Trainer, per_device_train_batch_size=BATCH)
    plain.train()
    last, _ = resumed("plain", save_at=4)
    last.train(resume_from_checkpoint=True)
    return {
        "settings": [settings(place, 2), settings(place, 4), settings(plain_place, 4)],
        "changed": refusal(changed.train, resume_from_checkpoint=True)[0],
    }


def auto_microbatches(folder: str) -> list[int]:
    """Return the numbers of microbatches of models with batch norm, in each mode, and without."""
    numbers = []
    for layer, is_training in ((nn.BatchNorm1d(4), True), (nn.BatchNorm1d(4), False), (nn.LayerNorm(4), False)):
        instance = trainer(folder, net=nn.Sequential(layer).train(is_training), microbatches="auto")
        numbers.append(instance.get_train_dataloader().steps.loader.settings_of(0)["microbatches"])
    return numbers


class _Offloading(transformers.Trainer):
    """Trainer with the training step of trainers of TRL."""

    def training_step(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the mixin comes first")


_Offloading.__module__, _Offloading.__name__ = "trl.trainer.sft_trainer", "SFTTrainer"


class _Counted:
    entries = 0

    def __enter__(self) -> None:
        self.entries += 1

    def __exit__(self, *_: object) -> None:
        pass


def options_of_step(folder: str) -> dict[str, Any]:
    """Return TF32 of the steps, the entries of the context of TRL, and operations of a step."""

    class Own(SamestepTrainerMixin, _Offloading):
        pass

    instance = trainer(folder, Own, max_steps=2)
    instance.args.tf32 = True  # TrainingArguments(tf32=True) needs a GPU
    instance.maybe_activation_offload_context = _Counted()
    instance.train()
    batch = next(iter(instance.get_train_dataloader()))
    plain = transformers.Trainer.floating_point_ops
    return {
        "tf32": instance._engine.config.tf32,
        "entries": instance.maybe_activation_offload_context.entries,
        "operations": instance.floating_point_ops(batch),
        "sum": sum(plain(instance, microbatch.data) for microbatch in batch.local_microbatches),
    }


def other_batches(folder: str) -> str:
    """Return the code of a resumption with another global batch size."""
    return refusal(trainer(folder, batch=16).train, resume_from_checkpoint=True)[0]


def generate(folder: str) -> dict[str, Any]:
    """Train an encoder and a decoder, and generate text in the evaluation."""
    torch.manual_seed(1)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    instance = Seq2SeqTrainer(
        model=transformers.T5ForConditionalGeneration(config),
        args=transformers.Seq2SeqTrainingArguments(
            folder,
            max_steps=3,
            predict_with_generate=True,
            generation_max_length=6,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
            per_device_eval_batch_size=3,
        ),
        data_collator=padded,
        train_dataset=rows(60),
        eval_dataset=rows(31),
        global_batch_size=20,
        microbatches=5,
    )
    instance.train()
    predicted = instance.predict(rows(31))
    return {
        "weights": digest(instance.model),
        "texts": predicted.predictions.tolist(),
        "loss": predicted.metrics["test_loss"],
    }


def frozen(folder: str) -> dict[str, Any]:
    """Train the head alone, with the rest frozen."""
    net = model()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.startswith("lm_head"))
    before = digest(net.model)
    trainer(folder, net=net, max_steps=4).train()
    assert digest(net.model) == before
    return {"weights": digest(net)}


class Tagger(nn.Module):
    """Classes of tokens and of rows; the loss is a mean over labels, which is NaN without any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        tokens = self.head(hidden)
        loss = nn.functional.cross_entropy(tokens.flatten(0, 1), labels.flatten())
        return {"loss": loss, "tokens": tokens, "rows": self.head(hidden.mean(1))}


def tag(folder: str, size: int) -> dict[str, Any]:
    """Train on rows of which short ones have no labels, grouped by length; predict values of tokens and rows."""
    unlabelled = []

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = padded(samples)
        batch["labels"][torch.tensor([len(sample["input_ids"]) < 10 for sample in samples])] = -100
        unlabelled.append(bool((batch["labels"] == -100).all()))
        return batch

    options = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": size}
    instance = trainer(folder, net=Tagger(), max_steps=6, **options)
    instance.data_collator, instance.compute_metrics = collate, None
    instance.train()
    has_unlabelled = any(unlabelled)
    predictions = instance.predict(rows(57)).predictions
    return {
        "weights": digest(instance.model),
        "unlabelled": has_unlabelled,
        "shapes": [list(values.shape) for values in predictions],
        "sums": [float(values.sum()) for values in predictions],
    }


def missing_names(folder: str) -> list[str]:
    """Return the private names of Transformers and Accelerate that the adapter needs and that do not exist."""
    instance = trainer(folder)
    names = ["_loss_shifts_labels", "_prepare_inputs", "gather_function", "model_accepts_loss_kwargs"]
    names += ["_load_callback_state", "_get_num_items_in_batch", "preprocess_logits_for_metrics", "is_in_train"]
    names += ["create_accelerator_and_postprocess", "get_batch_samples", "compute_loss_context_manager"]
    missing = [name for name in names if not hasattr(instance, name)]
    source = inspect.getsource(transformers.Trainer)
    missing += [text for text in ("self._tr_loss += tr_loss_step", "skip_first_batches") if text not in source]
    parameters = inspect.signature(transformers.Trainer.evaluation_loop).parameters
    expected = ["self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"]
    return missing + [name for name in expected if name not in parameters]
