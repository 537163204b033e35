"""Lengths, gathered values and buffers of a script for Accelerate, which do not depend on the number of processes."""

from typing import Any

import torch
from torch.utils.data import DataLoader

import samestep
from samestep.distributed.world import all_gather
from workers import accelerate_training as training

THREADS = 2
SHORT_BATCH_MICROBATCHES = 3  # of which one of two processes has one more than the other


def values() -> dict[str, Any]:
    """Return the values on rank 0."""
    training.set_launcher_variables()
    with samestep.start(device="cpu", threads=THREADS) as world:
        script = training.Script(world=world)
        return {
            "threads": torch.get_num_threads(),
            "lengths": _lengths(script),
            "lists": _gathered_lists(script),
            "buffers": _buffers_after_an_evaluation_in_training_mode(script, world),
            "losses": _gathered_losses_around_an_evaluation(script),
        }


def _lengths(script: training.Script) -> list[int]:
    script.model.eval()
    lengths = [len(script.train), len(script.tests[0])]
    script.evaluate()  # ends in training mode
    lengths += [len(script.train), len(script.tests[0])]
    script.model.eval()
    return [*lengths, len(script.train), len(script.tests[0])]


@torch.no_grad()
def _gathered_lists(script: training.Script) -> list[Any]:
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
def _buffers_after_an_evaluation_in_training_mode(script: training.Script, world: samestep.World) -> list[str]:
    script.model.train()
    for inputs, _ in script.tests[0]:
        script.model(inputs)
    return sorted(set(all_gather(training.digest(script.model), world)))


def _gathered_losses_around_an_evaluation(script: training.Script) -> list[int]:
    """Return the numbers of losses in global batches, with an evaluation of the training data in the first body."""
    script.accelerator.free_memory()
    script.accelerator.microbatches = SHORT_BATCH_MICROBATCHES
    model, optimizer, _ = training.objects()
    loader = DataLoader(training.dataset(2 * training.BATCH), batch_size=training.BATCH)
    model, optimizer, loader = script.accelerator.prepare(model, optimizer, loader)
    counts, has_evaluated = [0], False
    for data in loader:
        if not has_evaluated:
            has_evaluated = True
            with torch.no_grad():
                assert len(list(loader)) in (1, 2)
        else:
            counts[-1] += len(script.accelerator.gather(torch.zeros(())))
        script.accelerator.backward(training.cross_entropy(model, data))
        optimizer.step()
        if script.accelerator.sync_gradients:
            counts.append(0)
    return counts
