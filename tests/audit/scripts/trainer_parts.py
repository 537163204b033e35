"""Rows, model and arguments of the audited scripts with the Trainer of Transformers."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    """Rows of tokens with labels of different lengths."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.rows = [torch.randint(3, 50, (12,), generator=generator) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[4 + index % 8 :] = -100
        return {"input_ids": self.rows[index], "labels": labels}


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def trainer(kind: type[Trainer] = Trainer, rows: int = 45, **options: Any) -> Trainer:
    """Return a Trainer; the seed differs between ranks, and the order of samples does not."""
    settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2}
    seeds = {"seed": int(os.environ["RANK"]), "data_seed": 0}
    arguments = TrainingArguments(**{"output_dir": "output", **settings, **sizes, **seeds, **options})
    return kind(llama(), arguments, train_dataset=Rows(rows), eval_dataset=Rows(13))
