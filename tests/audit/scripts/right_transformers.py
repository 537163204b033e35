"""Trainer of transformers with padded rows, evaluation, a schedule with warm-up and checkpoints."""

import os

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.rows = [torch.randint(3, 50, (12,), generator=generator) for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        labels = self.rows[index].clone()
        labels[4 + index % 8 :] = -100
        return {"input_ids": self.rows[index], "labels": labels}


config = LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    attention_dropout=0.1,
)
arguments = TrainingArguments(
    "output",
    use_cpu=True,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    num_train_epochs=2,
    gradient_accumulation_steps=2,
    warmup_steps=2,
    lr_scheduler_type="linear",
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=2,
    report_to=[],
    disable_tqdm=True,
    seed=int(os.environ["RANK"]),
    data_seed=0,
)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=Rows(45), eval_dataset=Rows(13)).train()
