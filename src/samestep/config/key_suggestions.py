"""Equivalents of the options of training tutorials, timm, PaddleViT, Lightning and Hugging Face.

An unknown recipe key or command-line option that another tool has is answered with the key or option of Samestep that
has this meaning, and with the value in its units.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

_TYPO = 0.85  # least similarity of a misspelled word


@dataclass(frozen=True)
class Equivalent:
    """Key or option of Samestep with the meaning of an option of another tool.

    Attributes:
        key: recipe key, such as `step.seed`; option, such as `--workers`; or command, such as `samestep resume RUN`.
            Empty if nothing has to be set.
        value: value of the key or option; None for a command.
        note: difference in meaning, or the reason if nothing has to be set.
    """

    key: str
    value: Any = None
    note: str = ""

    @property
    def is_recipe_key(self) -> bool:
        """Whether the key belongs to a recipe."""
        return bool(self.key) and not self.key.startswith(("--", "samestep "))

    @property
    def argument(self) -> str:
        """Command-line arguments, such as `--set step.seed=3` or `--workers 4`; empty if nothing has to be set."""
        if not self.is_recipe_key:
            return self.key if self.value is None else f"{self.key} {shlex.quote(_text(self.value))}"
        return f"--set {shlex.quote(f'{self.key}={_text(self.value)}')}"

    def suggestion(self, key: str = "") -> str:
        """Return the suggestion for an error message about `key`: only the argument if this is the key with a value."""
        if not self.key:
            return f"leave the option out: {self.note}"
        note = f" ({self.note})" if self.note else ""
        if self.key == key:
            return f"{self.argument}{note}"
        if self.is_recipe_key:
            argument = "" if isinstance(self.value, Mapping) else f" {self.argument}"
            return f"did you mean {self.key}?{argument}{note}"
        return f"did you mean {self.argument}?{note}"


# Words with the same value, by recipe key or option. Case, `-` and `_` have no effect.
_SAME_VALUE = {
    "optimizer.options.lr": "lr learning_rate base_lr init_lr initial_lr lr0 lr_init",
    "optimizer.options.momentum": "momentum sgd_momentum",
    "optimizer.options.weight_decay": "wd weight_decay l2 l2_reg",
    "optimizer.options.betas": "betas opt_betas adam_betas",
    "optimizer.options.eps": "eps opt_eps adam_eps adam_epsilon",
    "optimizer.options.nesterov": "nesterov",
    "optimizer.layer_decay": "layer_decay layer_lr_decay lr_layer_decay llrd",
    "model.name": "arch a model model_name model_type backbone net network",
    "model.pretrained": "weights pretrained_weights pretrained_path pretrain_path init_checkpoint init_weights "
    "load_from finetune weights_path pretrain_weights pretrained_model model_path load checkpoint checkpoint_path",
    "model.options.drop_path_rate": "drop_path drop_path_rate",
    "loss.name": "loss loss_fn criterion loss_function",
    "loss.options.label_smoothing": "label_smoothing smoothing label_smoothing_factor",
    "data.options.path": "data_path data_dir data_root dataset_path dataset_dir dataset_root train_dir train_path "
    "train_data data_folder root imagenet_path",
    "data.options.evaluation_path": "val_dir val_path valid_dir valid_path eval_path eval_dir test_path val_data",
    "data.options.image_size": "img_size image_size input_size crop_size imgsz train_crop_size resize",
    "data.options.evaluation_fraction": "val_split valid_ratio val_ratio val_fraction test_size val_rate",
    "data.options.augment.mixup_alpha": "mixup mixup_alpha",
    "data.options.augment.cutmix_alpha": "cutmix cutmix_alpha",
    "data.options.augment.random_erasing": "reprob random_erase random_erasing random_erase_prob",
    "data.options.augment.color_jitter": "color_jitter",
    "data.options.augment.auto_augment": "auto_augment",
    "schedule.step_epochs": "lr_step_size step_size lr_decay_epochs decay_epochs lr_steps",
    "schedule.gamma": "lr_gamma gamma decay_rate lr_decay lr_decay_rate",
    "schedule.final": "lrf lr_final min_lr_ratio",
    "schedule.warmup_epochs": "warmup warmup_epoch warmup_epochs lr_warmup_epochs warm_up_epochs",
    "ema.decay": "ema_decay model_ema_decay",
    "step.seed": "seed random_seed manual_seed",
    "step.clip_norm": "clip_grad max_grad_norm grad_clip gradient_clip_val clip_grad_norm gradient_clipping clip",
    "step.compile": "compile torch_compile torchcompile compile_model",
    "step.tf32": "tf32 allow_tf32",
    "data.drop_last": "drop_last",
    "--workers": "workers num_workers nw j n_workers dataloader_num_workers data_workers loader_workers",
    "--prefetch": "prefetch prefetch_factor",
    "--name": "name exp_name run_name experiment_name exp tag experiment",
    "--runs": "output output_dir save_dir out_dir work_dir log_dir checkpoint_dir save_path default_root_dir",
    "--checkpoint-every": "save_steps checkpointing_steps save_interval_steps every_n_train_steps",
    "--keep": "save_total_limit save_top_k keep_checkpoints max_keep",
    "--max-restarts": "max_restarts restarts",
    "--strategy": "strategy",
    "--loggers": "loggers logger report_to",
}

# Words without an equivalent, by the reason.
_OMITTED = {
    "ranks find each other without it": "rank local_rank node_rank dist_url dist_backend init_method master_addr "
    "master_port port distributed multiprocessing_distributed ddp use_ddp launcher backend is_distributed",
    "every step is logged to events.jsonl of the run": "print_freq log_interval logging_steps log_every log_freq "
    "report_freq log_every_n_steps disp_iter",
    "the run is evaluated after every epoch": "eval_freq eval_interval val_interval eval_steps eval_every "
    "check_val_every_n_epoch validate_freq evaluation_strategy eval_strategy",
    "a checkpoint is written after every epoch; --checkpoint-every STEPS writes more": "save_freq save_every "
    "save_period save_interval save_epoch save_strategy save_model",
    "the loader does this": "pin_memory persistent_workers non_blocking shuffle train_shuffle",
    "the default reduction, exact, is deterministic": "deterministic cudnn_benchmark cudnn_deterministic benchmark",
    "every rank uses all trained parameters; frozen parameters: model.freeze": "find_unused_parameters static_graph "
    "gradient_as_bucket_view broadcast_buffers",
    "the number of classes follows from the data": "num_classes nb_classes n_classes",
}

# Switches: the key or option, its values for on and off, and a note.
_SWITCHES: dict[str, tuple[str, Any, Any, str]] = {
    "no_cuda use_cpu cpu": ("--device", "cpu", "auto", ""),
    "fp16 use_fp16 half": ("step.precision", "fp16", "fp32", ""),
    "bf16 use_bf16": ("step.precision", "bf16", "fp32", ""),
    "sync_bn syncbn sync_batchnorm sync_batch_norm use_sync_bn use_syncbn convert_sync_bn": (
        *("step.batch_norm", "sync", "microbatch", ""),
    ),
    "freeze_encoder": ("model.freeze", ["encoder.*"], [], ""),
    "gradient_checkpointing grad_checkpointing activation_checkpointing use_checkpoint recompute": (
        *("step.recompute", ["blocks.*"], [], "shell patterns of module names"),
    ),
    "dp data_parallel use_dp": ("--strategy", "dp", "auto", ""),
    "fsdp zero use_fsdp": ("--strategy", "fsdp", "auto", ""),
    "wandb use_wandb": ("--loggers", "jsonl,progress,wandb", "jsonl,progress", ""),
}
_PRECISIONS = {
    "fp16": ("fp16", "16", "16-mixed", "16-true", "float16", "half", "o1", "o2"),
    "bf16": ("bf16", "bf16-mixed", "bf16-true", "bfloat16"),
    "fp32": ("fp32", "32", "32-true", "float32", "no", "none", "o0", "full"),
}
_SCHEDULES = {
    "cosine": ("cosineannealinglr", "cos", "warmupcosine", "cosine_with_restarts", "onecyclelr", "lambdalr"),
    "step": ("steplr", "multistep", "multisteplr", "exponential", "exponentiallr"),
    "linear": ("linearlr", "poly", "polynomial", "polynomiallr"),
    "constant": ("none", "constantlr", "constant_with_warmup", "fixed"),
}


def _squash(word: str) -> str:
    return word.lstrip("-").lower().replace("-", "").replace("_", "")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    # PyYAML reads lists and mappings in JSON too.
    return json.dumps(value)


def _is_on(value: Any) -> bool:
    return value not in (False, None, 0, "", "no", "none")


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _value_of(recipe: Mapping[str, Any], *path: str) -> Any:
    value: Any = recipe
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# --- words whose values change ---


def _epochs(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent("epochs", _integer(value))


def _batch_size(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent(
        "batch_size", value, f"of all processes together; --per-device-batch-size {_text(value)} for each process"
    )


def _device_batch_size(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    # `N` stays for the user: a batch size must not depend on the machine.
    return Equivalent(f"--per-device-batch-size {_text(value)} --processes N", None, "batch_size is the product")


def _accumulate(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    note = "microbatches per process and step; batch_size stays the samples of one step"
    return Equivalent("--accumulate", _integer(value), note)


def _processes(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    text = ",".join(map(str, value)) if isinstance(value, list) else _text(value)
    if "," in text:
        return Equivalent("--devices", text)
    return Equivalent("--processes", "auto" if text in ("-1", "auto", "gpu", "all") else text)


def _device_numbers(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent("--devices", ",".join(map(str, value)) if isinstance(value, list) else _text(value))


def _device(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    kind, colon, number = _text(value).partition(":")
    if colon:
        return Equivalent("--devices", number)
    if kind.replace(",", "").isdigit():
        return Equivalent("--devices", kind)
    return Equivalent("--device", {"gpu": "cuda", "true": "cuda", "false": "cpu"}.get(kind, kind))


def _precision(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    text = _text(value).lower()
    name = next((name for name, words in _PRECISIONS.items() if text in words), None)
    if name is None and (isinstance(value, bool) or text in ("true", "false")):
        name = "bf16" if value is True or text == "true" else "fp32"
    return Equivalent("step.precision", name or value)


def _freeze(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    if isinstance(value, list | str):
        return Equivalent("model.freeze", value if isinstance(value, list) else [value])
    if not _is_on(value):
        return Equivalent("model.freeze", [])
    return Equivalent("model.freeze_except", ["fc.*"], "shell patterns of the parameters that are trained, here a head")


def _pretrained(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    if isinstance(value, bool):
        value, note = ("FILE.safetensors", "nothing is downloaded") if value else (None, "")
        return Equivalent("model.pretrained", value, note)
    return Equivalent("model.pretrained", value)


def _resume(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent("samestep resume runs/NAME", None, "with optimizer, position and random state")


def _evaluate(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent("samestep eval runs/NAME")


def _config(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent(f"samestep train {_text(value)}", None, "samestep convert converts a YAML file of PaddleViT")


def _optimizer(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent("optimizer.name", _text(value).lower())


def _data(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    is_path = any(sign in _text(value) for sign in "/\\.")
    return Equivalent("data.options.path" if is_path else "data.name", value)


def _schedule(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    text = _text(value).lower()
    return Equivalent("schedule.name", next((name for name, words in _SCHEDULES.items() if text in words), text))


def _final_rate(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    rate = _value_of(recipe, "optimizer", "options", "lr")
    note = "a fraction of optimizer.options.lr"
    if isinstance(value, int | float) and isinstance(rate, int | float) and rate:
        return Equivalent("schedule.final", float(f"{value / rate:.6g}"), note)
    return Equivalent("schedule.final", f"{_text(value)}/LR", note)


def _warmup_steps(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent("schedule.warmup_epochs", f"{_text(value)}/STEPS_PER_EPOCH", "epochs, fractions too")


def _warmup_ratio(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    epochs = recipe.get("epochs")
    if isinstance(value, int | float) and isinstance(epochs, int):
        return Equivalent(
            "schedule.warmup_epochs", float(f"{value * epochs:.6g}"), f"{_text(value)} of {epochs} epochs"
        )
    return Equivalent("schedule.warmup_epochs", f"{_text(value)}*EPOCHS")


def _percent(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    fraction = value / 100 if isinstance(value, int | float) else f"{_text(value)}/100"
    return Equivalent("data.options.evaluation_fraction", fraction)


def _ema(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    if not _is_on(value):
        return Equivalent("ema", None)
    return Equivalent("ema.decay", value if isinstance(value, float) and 0 < value < 1 else 0.9999)


def _channels_last(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent("step.channels_last", value == "channels_last" if isinstance(value, str) else _is_on(value))


def _metrics(value: Any, recipe: Mapping[str, Any]) -> Equivalent:
    return Equivalent("metrics", value if isinstance(value, list) else [value])


_TRANSLATED: dict[Callable[[Any, Mapping[str, Any]], Equivalent], str] = {
    _epochs: "epochs epoch num_epochs num_epoch max_epochs max_epoch n_epochs nepochs num_train_epochs train_epochs "
    "total_epochs",
    _batch_size: "batch_size bs batch b train_batch_size train_bs global_batch_size total_batch_size",
    _device_batch_size: "per_device_batch_size per_device_train_batch_size per_gpu_batch_size per_gpu_train_batch_size "
    "batch_size_per_gpu samples_per_gpu imgs_per_gpu micro_batch_size train_micro_batch_size_per_gpu",
    _accumulate: "accumulate accumulation_steps gradient_accumulation_steps grad_accum grad_accum_steps accum_iter "
    "accum_steps accumulate_grad_batches gradient_accumulation grad_accumulation accumulation update_freq iter_size",
    _processes: "processes gpus ngpus num_gpus n_gpus n_gpu gpu_num nproc nproc_per_node num_processes world_size "
    "devices n_procs num_procs n_devices num_devices",
    _device_numbers: "device_ids gpu_ids gpu gpu_id visible_devices cuda_visible_devices",
    _device: "device accelerator cuda use_cuda",
    _precision: "precision amp use_amp mixed_precision amp_dtype amp_level dtype",
    _freeze: "freeze freeze_layers freeze_backbone feature_extract freeze_features only_train_head",
    _pretrained: "pretrained use_pretrained",
    _resume: "resume resume_from resume_from_checkpoint auto_resume continue start_epoch last_epoch ckpt_path",
    _evaluate: "eval evaluate eval_only test_only do_eval only_eval",
    _config: "cfg config cfg_file config_file",
    _optimizer: "opt optim optimizer optimizer_name optimizer_type",
    _data: "data dataset",
    _schedule: "sched scheduler lr_scheduler lr_schedule lr_scheduler_type scheduler_type lr_policy schedule",
    _final_rate: "min_lr eta_min end_lr lr_min min_learning_rate final_lr lr_end",
    _warmup_steps: "warmup_steps warmup_iters num_warmup_steps",
    _warmup_ratio: "warmup_ratio warmup_proportion",
    _percent: "val_percent validation",
    _ema: "ema use_ema model_ema",
    _channels_last: "channels_last memory_format",
    _metrics: "metric metrics eval_metric eval_metrics metric_for_best_model",
}  # fmt: skip

_SAME = {_squash(word): key for key, words in _SAME_VALUE.items() for word in words.split()}
_REASONS = {_squash(word): reason for reason, words in _OMITTED.items() for word in words.split()}
_ON_AND_OFF = {_squash(word): switch for words, switch in _SWITCHES.items() for word in words.split()}
_TRANSLATIONS = {_squash(word): translate for translate, words in _TRANSLATED.items() for word in words.split()}


def find_equivalent(
    word: str, value: Any, recipe: Mapping[str, Any] = MappingProxyType({}), *, is_exact: bool = False
) -> Equivalent | None:
    """Return the equivalent of an option of another tool, or None.

    Args:
        word: name of the option; case, `-` and `_` have no effect.
        value: value of the option.
        recipe: the recipe as plain data, for values that depend on other keys.
        is_exact: accept no typing errors in the word.
    """
    name = _squash(word)
    known = {**_SAME, **_REASONS, **_ON_AND_OFF, **_TRANSLATIONS}
    if name not in known:
        if is_exact:
            return None
        close = get_close_matches(name, known, n=1, cutoff=_TYPO)
        if not close:
            return None
        (name,) = close
    if name in _REASONS:
        return Equivalent("", None, _REASONS[name])
    if name in _SAME:
        return Equivalent(_SAME[name], value)
    if name in _ON_AND_OFF:
        key, on, off, note = _ON_AND_OFF[name]
        return Equivalent(key, on if _is_on(value) else off, note)
    return _TRANSLATIONS[name](value, recipe)
