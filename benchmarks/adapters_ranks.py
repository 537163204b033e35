"""Ranks of `adapters.py`: a framework and its adapter take turns in the same processes.

`torchrun --nproc-per-node 2 adapters_ranks.py FRAMEWORK OUTPUT --model resnet --rounds 10 --steps 20`
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_models import build_dataset, build_model, build_optimizer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

BATCH, WARMUP, PROCESSES = 64, 4, 2

Turn = Callable[[bool, str, "Clock"], None]


class Clock:
    """Times of optimizer steps: of the clock, and of this rank's processor time with all threads."""

    def __init__(self, steps: int) -> None:
        self.count, self._ticks = WARMUP + steps, list[tuple[float, float]]()

    def tick(self) -> bool:
        """Note the end of a step; return whether it is the last one."""
        self._ticks.append((time.perf_counter(), time.process_time()))
        return len(self._ticks) == self.count

    def per_step(self) -> tuple[float, float]:
        """Return milliseconds per step, without the first steps of the turn."""
        (wall, cpu), (last_wall, last_cpu) = self._ticks[WARMUP - 1], self._ticks[-1]
        steps = self.count - WARMUP
        return 1000 * (last_wall - wall) / steps, 1000 * (last_cpu - cpu) / steps


def with_accelerate(is_adapter: bool, name: str, clock: Clock) -> None:
    """Train with a loop for Accelerate."""
    import accelerate

    from samestep.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, microbatches=PROCESSES) if is_adapter else accelerate.Accelerator(cpu=True)
    model = build_model(name)
    optimizer = build_optimizer(model)
    loader = DataLoader(build_dataset(), batch_size=BATCH if is_adapter else BATCH // PROCESSES, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for images, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(images), labels))
        optimizer.step()
        if accelerator.sync_gradients and clock.tick():
            break
    accelerator.free_memory()


def with_lightning(is_adapter: bool, name: str, clock: Clock) -> None:
    """Train with Lightning's trainer, which logs the loss."""
    import lightning

    from samestep.integrations.lightning import SamestepStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build_model(name)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            images, labels = batch
            loss = cross_entropy(self.net(images), labels)
            self.log("train_loss", loss)
            return loss

        def on_train_batch_end(self, *arguments: Any) -> None:
            clock.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self)

    strategy: Any = SamestepStrategy(microbatches=PROCESSES) if is_adapter else "ddp"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy=strategy,
        max_steps=clock.count,
        enable_model_summary=False,
        **quiet,
    )
    loader = DataLoader(build_dataset(), batch_size=BATCH if is_adapter else BATCH // PROCESSES, shuffle=True)
    trainer.fit(Module(), loader)


def with_transformers(is_adapter: bool, name: str, clock: Clock) -> None:
    """Train with the trainer of Transformers."""
    import transformers

    from samestep.integrations.transformers import Trainer

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = build_model(name)

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.net(images)
            return {"loss": cross_entropy(outputs, labels), "logits": outputs}

    class Rows(Dataset[Any]):
        def __init__(self) -> None:
            self._data = build_dataset()

        def __len__(self) -> int:
            return len(self._data)

        def __getitem__(self, index: int) -> Any:
            image, label = self._data[index]
            return {"images": image, "labels": label}

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=clock.count,
            per_device_train_batch_size=BATCH // PROCESSES,
            save_strategy="no",
            logging_steps=10,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            log_level="error",
        )
        kind: Any = Trainer if is_adapter else transformers.Trainer
        options: Any = {"global_batch_size": BATCH, "microbatches": PROCESSES} if is_adapter else {}
        trainer = kind(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Ticks()], **options)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


TURNS: dict[str, Turn] = {
    "Accelerate": with_accelerate,
    "Lightning": with_lightning,
    "Transformers": with_transformers,
}


def take_turns(turn: Turn, model: str, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return the times of the framework and of the adapter in every round."""
    times: dict[str, list[tuple[float, float]]] = {"framework": [], "adapter": []}
    for number in range(-1, rounds):  # the first round warms up
        for name in sorted(times, reverse=bool(number % 2)):
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(False)  # the adapter sets it for its turn
            clock = Clock(steps)
            if dist.is_initialized():
                dist.barrier()
            turn(name == "adapter", model, clock)
            if number >= 0:
                times[name].append(clock.per_step())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=TURNS)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="resnet")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    times = take_turns(TURNS[options.framework], options.model, options.rounds, options.steps)
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(times), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
