"""Training with Accelerate's loop, with Samestep's own and with a plain one; values that do not depend on processes."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from helpers.models import digest
from samestep.distributed.env import set_environment
from samestep.distributed.world import all_gather
from samestep.integrations.accelerate import Accelerator
from samestep.launcher.job import rank_and_size

SAMPLES, FEATURES, CLASSES, EPOCHS = 1003, 12, 5, 3
BATCH, MICROBATCHES, CLIP = 64, 8, 0.5
TEST_SAMPLES, TEST_BATCH = (101, 5), 16  # two datasets: with a short last batch, and with one short batch
STEPS = EPOCHS * -(-SAMPLES // BATCH)


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (samples,), generator=generator))


def objects() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def cross_entropy(model: nn.Module, data: Any) -> torch.Tensor:
    inputs, targets = data
    return nn.functional.cross_entropy(model(inputs), targets)


class _TorchClipping(samestep.Callback):
    """Clips as the libraries do, by torch's norm, in place of `clip_norm`."""

    def end_gradients(self, engine: samestep.Engine) -> None:
        nn.utils.clip_grad_norm_(engine.model.parameters(), CLIP)


def own_loop(world: samestep.World) -> nn.Module:
    model, optimizer, scheduler = objects()
    engine = samestep.Engine(
        model,
        optimizer,
        world=world,
        scheduler=scheduler,
        scheduler_interval="step",
        callbacks=[_TorchClipping()],
    )
    batches = samestep.loader(dataset(), batch_size=BATCH, microbatches=MICROBATCHES, shuffle=True, world=world)
    for _ in range(EPOCHS):
        for batch in batches:
            engine.step(batch, forward=cross_entropy)
    return model


def plain_loop() -> str:
    with samestep.start(device="cpu") as world:
        model, optimizer, scheduler = objects()
        loop = samestep.MicrobatchLoop(model, world=world)
        batches = samestep.loader(dataset(), batch_size=BATCH, microbatches=MICROBATCHES, shuffle=True, world=world)
        for _ in range(EPOCHS):
            for data in loop.microbatches(batches):
                optimizer.zero_grad()
                loop.backward(cross_entropy(model, data))
                torch.rand(3)  # the body may draw numbers
                if loop.is_last:
                    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    scheduler.step()
        return digest(model)


class Script:
    """A script for Accelerate; `accumulates` surrounds the body of the loop by `accelerator.accumulate`."""

    def __init__(self, *, accumulates: bool = False, **options: Any) -> None:
        self.accelerator = Accelerator(microbatches=MICROBATCHES, **options)
        self.accumulates = accumulates
        model, optimizer, scheduler = objects()
        train = DataLoader(dataset(), batch_size=BATCH, shuffle=True)
        tests = [DataLoader(dataset(samples), batch_size=TEST_BATCH) for samples in TEST_SAMPLES]
        self.model, self.optimizer, self.train, self.scheduler, *self.tests = self.accelerator.prepare(
            model, optimizer, train, scheduler, *tests
        )

    def run(self, *, save: tuple[int, Path] | None = None, load: Path | None = None) -> str:
        if load is not None:
            self.accelerator.load_state(str(load))
        for _ in range(self.accelerator.cursor.epoch, EPOCHS):
            for data in self.train:
                if self.accumulates:
                    with self.accelerator.accumulate(self.model):
                        self.step(data)
                else:
                    self.step(data)
                result = self.accelerator.step_result
                if save is not None and self.accelerator.sync_gradients and result.step == save[0]:
                    self.accelerator.save_state(str(save[1]))
                    return digest(self.model)
        return digest(self.model)

    def step(self, data: Any) -> None:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model, data)
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.scheduler.step()
        losses = self.accelerator.gather(loss.detach())  # a collective in the body
        assert 1 <= len(losses) <= self.accelerator.num_processes
        assert not self.accelerator.check_trigger()  # another one

    @torch.no_grad()
    def evaluate(self) -> list[list[float]]:
        self.model.eval()
        rows = []
        for loader in self.tests:
            for inputs, targets in loader:
                outputs, labels = self.accelerator.gather_for_metrics((self.model(inputs), targets))
                assert len(outputs) == len(labels)
                rows += outputs.tolist()
        self.model.train()
        return rows


def set_launcher_variables() -> None:
    """Set the variables of a launcher, which Accelerate reads."""
    rank, size = rank_and_size()
    if size > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        set_environment({name: str(value) for name, value in names.items()})


def train(action: str, folder: str, step: int) -> Any:
    """Train in a launched rank; `action` is `run`, `save` after some steps, or `load`."""
    set_launcher_variables()
    with samestep.start(device="cpu") as world:
        script = Script(accumulates=action == "run", world=world)
        if action == "run":
            return script.run(), script.evaluate()
        return script.run(**{"save": (step, Path(folder))} if action == "save" else {"load": Path(folder)})


def short_batch() -> str:
    """Return the hash of a model after a batch in which some ranks have no samples."""
    with samestep.start(device="cpu") as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.2), nn.Linear(16, CLASSES))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = samestep.MicrobatchLoop(model, world=world)
        batches = samestep.loader(dataset(BATCH + 3), batch_size=BATCH, microbatches=MICROBATCHES, world=world)
        for data in loop.microbatches(batches):
            loop.backward(cross_entropy(model, data))
            if loop.is_last:
                optimizer.step()
        return digest(model)


# --- lengths, gathered values and buffers of a script, which do not depend on the number of processes ---


THREADS = 2
SHORT_BATCH_MICROBATCHES = 3  # of which one of two processes has one more than the other


def values() -> dict[str, Any]:
    """Return the values on rank 0."""
    set_launcher_variables()
    with samestep.start(device="cpu", threads=THREADS) as world:
        script = Script(world=world)
        return {
            "threads": torch.get_num_threads(),
            "lengths": _lengths(script),
            "lists": _gathered_lists(script),
            "buffers": _buffers_after_an_evaluation_in_training_mode(script, world),
            "losses": _gathered_losses_around_an_evaluation(script),
        }


def _lengths(script: Script) -> list[int]:
    script.model.eval()
    lengths = [len(script.train), len(script.tests[0])]
    script.evaluate()  # ends in training mode
    lengths += [len(script.train), len(script.tests[0])]
    script.model.eval()
    return [*lengths, len(script.train), len(script.tests[0])]


@torch.no_grad()
def _gathered_lists(script: Script) -> list[Any]:
    rows = list[Any]()
    for inputs, targets in script.tests[0]:
        labels, texts = targets.tolist(), [[f"label {target}"] for target in targets]
        boxes = [row[: 1 + label] for row, label in zip(inputs, labels, strict=True)]  # of different lengths
        mappings = [{"id": label, "box": box} for label, box in zip(labels, boxes, strict=True)]
        gather = script.accelerator.gather_for_metrics
        pair = gather((texts, {"inputs": inputs}))
        tensors, people = gather(boxes, use_gather_object=True), gather(mappings)
        for text, row, tensor, entry in zip(pair[0], pair[1]["inputs"], tensors, people, strict=True):
            rows.append([text, row.tolist(), tensor.tolist(), entry["id"], entry["box"].tolist()])
    return rows


@torch.no_grad()
def _buffers_after_an_evaluation_in_training_mode(script: Script, world: samestep.World) -> list[str]:
    script.model.train()
    for inputs, _ in script.tests[0]:
        script.model(inputs)
    return sorted(set(all_gather(digest(script.model), world)))


def _gathered_losses_around_an_evaluation(script: Script) -> list[int]:
    """Return the numbers of losses in global batches, with an evaluation of the training data in the first body."""
    script.accelerator.free_memory()
    script.accelerator.microbatches = SHORT_BATCH_MICROBATCHES
    model, optimizer, _ = objects()
    loader = DataLoader(dataset(2 * BATCH), batch_size=BATCH)
    model, optimizer, loader = script.accelerator.prepare(model, optimizer, loader)
    counts, has_evaluated = [0], False
    for data in loader:
        if not has_evaluated:
            has_evaluated = True
            with torch.no_grad():
                assert len(list(loader)) in (1, 2)
        else:
            counts[-1] += len(script.accelerator.gather(torch.zeros(())))
        script.accelerator.backward(cross_entropy(model, data))
        optimizer.step()
        if script.accelerator.sync_gradients:
            counts.append(0)
    return counts


if __name__ == "__main__":
    script = Script()
    print(script.run())
    script.accelerator.end_training()
