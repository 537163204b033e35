"""Usage: `torchrun --standalone --nproc-per-node N with_hf_trainer.py OUTPUT`."""

from pathlib import Path
from typing import Any

import digits_task as task
import torch
from torch import nn
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

LEARNING_RATE = 0.05


class Digits(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = task.build_model(dropout)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.stack(labels)}


def count(prediction: EvalPrediction) -> dict[str, Any]:
    correct = prediction.predictions.argmax(axis=1) == prediction.label_ids
    return {"accuracy": float(correct.mean()), "samples": len(correct)}


def train(output: Path, dropout: float, processes: int) -> None:
    set_seed(task.SEED)
    training, held_out = task.build_datasets()
    model = Digits(dropout)
    arguments = TrainingArguments(
        output_dir=str(output / "trainer"),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=task.BATCH_SIZE // processes,
        per_device_eval_batch_size=task.BATCH_SIZE // processes,
        num_train_epochs=task.EPOCHS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,  # no clipping, as in the other scripts
        seed=task.SEED,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=training,
        eval_dataset=held_out,
        compute_metrics=count,
        optimizers=(task.build_optimizer(model), None),
    )
    trainer.train()
    values = trainer.evaluate()
    if trainer.is_world_process_zero():
        samples, accuracy = values["eval_samples"], values["eval_accuracy"]
        processes, steps = arguments.world_size, trainer.state.global_step
        task.report(output, model.net, processes=processes, steps=steps, samples=samples, accuracy=accuracy)


if __name__ == "__main__":
    options = task.parse()
    for dropout in options.dropout:
        train(options.output, dropout, options.processes)
