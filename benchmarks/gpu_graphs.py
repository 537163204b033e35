"""Check of `gpu.py`: microbatches that are replayed as CUDA graphs, their bits and their time."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from statistics import median
from typing import Any, Literal

import torch
from gpu_training import Outcome, Plan, build_dataset, build_engine, ready_batches, synchronize

import samestep
from samestep.config import StepConfig

STEPS, TURN, ROUNDS = 6, 10, 5
MODELS = ("wide", "small", "resnet18", "gpt")  # batch norm and dropout are in the last three
SAMPLES, MICROBATCHES = 64, 8


def graphs(device: Any) -> Outcome:
    """One digest with and without graphs, the reason where there are none, and the time of a step in both ways."""
    if device != "cuda":
        return Outcome(skipped="CUDA graphs need a GPU")
    outcome = Outcome()
    with samestep.start(device=device) as world:
        for name in MODELS:
            for precision in ("fp32", "bf16"):
                plan = Plan(name, MICROBATCHES, config=StepConfig(precision=precision, clip_norm=1.0))
                with outcome.attempt(f"{name}, {precision}"):
                    _compare(outcome, f"{name}, {precision}", plan, world)
    return outcome


def _compare(outcome: Outcome, key: str, plan: Plan, world: samestep.World) -> None:
    modes: tuple[Literal["off", "auto"], ...] = ("off", "auto")
    digests: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for mode in modes:
        engine = build_engine(replace(plan, config=replace(plan.config, cuda_graphs=mode)), world)
        batches = ready_batches(build_dataset(plan.model, SAMPLES * STEPS), SAMPLES, MICROBATCHES, STEPS, world)
        losses = [engine.step(batch).loss for batch in batches]
        digests[mode] = repr(losses) + _digest(engine.model)
        steps[mode] = lambda engine=engine, batch=batches[0]: engine.step(batch)
    runner = engine.step_runner
    outcome.require(runner.replays_graphs is True, f"{key}: no graphs: {runner.graphs_reason}")
    outcome.require_one(f"{key}, digests", digests)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for number in range(ROUNDS + 1):  # the first round warms up
        for mode, step in steps.items():
            spent = _seconds(step, world.device)
            if number:
                seconds[mode].append(spent)
    ratio = median(graph / usual for graph, usual in zip(seconds["auto"], seconds["off"], strict=True))
    outcome.numbers[key] = {"milliseconds": round(1000 * median(seconds["auto"]), 3), "ratio": round(ratio, 3)}


def _digest(model: torch.nn.Module) -> str:
    tensors = [tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(tensors)).hexdigest()


def _seconds(step: Any, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(TURN):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / TURN
