"""Usage: `torchrun --standalone --nproc-per-node N with_accelerate.py OUTPUT`."""

from pathlib import Path

import digits_task as task
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader


def train(output: Path, dropout: float, accelerator: Accelerator, *, drop_last: bool) -> None:
    set_seed(task.SEED)
    training, held_out = task.build_datasets()
    batch_size = task.BATCH_SIZE // accelerator.num_processes
    model = task.build_model(dropout)
    model, optimizer, batches, held_out_batches = accelerator.prepare(
        model,
        task.build_optimizer(model),
        DataLoader(training, batch_size=batch_size, shuffle=True, drop_last=drop_last),
        DataLoader(held_out, batch_size=batch_size),
    )
    steps = 0
    for _ in range(task.EPOCHS):
        model.train()
        for inputs, targets in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            steps += 1

    model.eval()
    correct = samples = 0
    for inputs, targets in held_out_batches:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=1)
        predictions, references = accelerator.gather_for_metrics((predictions, targets))
        correct += (predictions == references).sum().item()
        samples += len(references)
    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(model)
        processes, accuracy = accelerator.num_processes, correct / samples
        task.report(output, trained, processes=processes, steps=steps, samples=samples, accuracy=accuracy)


if __name__ == "__main__":
    options = task.parse()
    # Accelerate's documentation recommends this sampler for reproducible order.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    for dropout in options.dropout:
        train(options.output, dropout, accelerator, drop_last=options.drop_last)
    accelerator.end_training()
