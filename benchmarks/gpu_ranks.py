"""Checks of `gpu.py` with several ranks, which share the GPU: bits, divided models, faults, and the tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from gpu_training import CLASSES, Outcome, Plan, Trained, distance, joined, train
from torch.nn.functional import cross_entropy

import samestep
from samestep.config import MeshConfig, StrategyConfig
from samestep.distributed.world import World
from samestep.launcher.failure import RankError

PRELOAD = ("gpu_training", "gpu_ranks")
Fault = Literal["kill", "label", "memory"]


def trainings(plans: list[Plan], device: Any, strategy: StrategyConfig | None = None) -> list[Trained]:
    """Train all plans; a function for `samestep.launch`."""
    reduction = plans[0].reduction
    with joined(device, strategy, reduction) as world:
        return [train(plan, world) for plan in plans]


def _launch(function: Any, *arguments: Any, device: str, processes: int) -> Any:
    return samestep.launch(
        function, *arguments, processes=processes, preload=PRELOAD, share_gpu=device != "cpu", hang_after=60
    )


def shared(device: str) -> Outcome:
    """Bits of `exact`, and divided models, on ranks that share the GPU."""
    outcome = Outcome()
    models = ("resnet18", "tokens", "gpt", "small") if device != "cpu" else ("tokens", "small")
    plans = [Plan(model, 8) for model in models]
    results = {}
    for ranks in (1, 2, 3, 4) if device != "cpu" else (1, 3, 4):
        with outcome.attempt(f"{ranks} ranks"):
            results[ranks] = _launch(trainings, plans, device, device=device, processes=ranks)
    for index, plan in enumerate(plans):
        outcome.require_one(plan.model, {f"{ranks} ranks": found[index].digest for ranks, found in results.items()})
    _divided(outcome, device)
    return outcome


def _divided(outcome: Outcome, device: str) -> None:
    """Compare divided models with one rank in float64, under `fast`."""
    plan = [Plan("gpt", 4, is_double=True, reduction="fast")]
    (expected,) = _launch(trainings, plan, device, device=device, processes=1)
    strategies = {
        "fsdp": (StrategyConfig(name="fsdp"), 2),
        "hsdp": (StrategyConfig(name="hsdp", mesh=MeshConfig(replicate=2, shard=2)), 4),
        "tp": (StrategyConfig(name="tp"), 2),
    }
    for name, (strategy, ranks) in strategies.items():
        with outcome.attempt(name):
            (found,) = _launch(trainings, plan, device, strategy, device=device, processes=ranks)
            difference = distance(found.weights, expected.weights)
            outcome.numbers[f"{name}, difference from 1 rank"] = difference
            outcome.require(difference < 1e-10, f"{name}: weights differ from those of one rank by {difference:.1e}")


def failing(plan: Plan, fault: Fault, device: Any) -> None:
    """Train, with a fault in rank 1 after two steps; a function for `samestep.launch`."""
    with joined(device) as world:
        train(replace(plan, steps=2), world)
        if world.rank == 1:
            _fail(fault, world)
        train(replace(plan, steps=4, folder=None), world)


def _fail(fault: Fault, world: World) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "label":
        logits, labels = torch.zeros(4, CLASSES, device=world.device), torch.full((4,), CLASSES, device=world.device)
        cross_entropy(logits, labels).item()
    free, total = torch.get_device_module(world.device).mem_get_info(world.device)
    torch.empty(total + free, dtype=torch.uint8, device=world.device)


def faults(device: str) -> Outcome:
    """Reports of a fault in one rank, and a resumption after a kill on another number of ranks."""
    outcome = Outcome()
    expected: dict[Fault, str] = {"kill": "SIGKILL", "label": "assert|bounds|range|targets", "memory": "out of memory"}
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan("small", 4, steps=4)
        saved = replace(plan, folder=Path(folder), save_after=2)
        for fault, pattern in expected.items():
            if fault == "memory" and device == "cpu":
                continue
            try:
                _launch(failing, saved if fault == "kill" else plan, fault, device, device=device, processes=3)
                outcome.failures.append(f"{fault}: the launch did not fail")
            except RankError as error:
                text = str(error)
                outcome.numbers[fault] = text.strip().splitlines()[0][:200]
                outcome.require(error.failure.rank == 1, f"{fault}: the report is not that of rank 1: {text[:400]}")
                is_named = re.search(pattern, text, re.IGNORECASE) is not None
                outcome.require(is_named, f"{fault}: the report lacks {pattern}: {text[:400]}")
        resumed = replace(saved, save_after=None, resume=True)
        with outcome.attempt("resumption"):
            (whole,) = _launch(trainings, [plan], device, device=device, processes=1)
            (after,) = _launch(trainings, [resumed], device, device=device, processes=2)
            digests = {"1 rank": whole.digest, "resumed": after.digest}
            outcome.require_one("resumed on 2 ranks after a kill among 3", digests)
    return outcome


def tests(device: str) -> Outcome:
    """The tests with the marker `gpu`."""
    if device == "cpu":
        return Outcome(skipped="the tests with the marker gpu need a GPU")
    root = Path(__file__).parents[1]
    workers = max(1, min(10, (os.cpu_count() or 1) // 2))
    options = ["-v", "--tb", "short", "--durations", "10", "-p", "no:cacheprovider", "-m", "gpu", "-n", str(workers)]
    options += ["-W", "default"]  # other versions of torch have other warnings
    # Not all tests: modules of others need packages that the machine may lack.
    files = ["tests/gpu", "tests/unit/data/test_batch.py", "tests/unit/checkpoint/test_snapshot.py"]
    files += ["tests/strategies"]
    command, lines = [sys.executable, "-m", "pytest", *options, *files], []
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as done:
        assert done.stdout is not None
        for line in done.stdout:
            print(line, end="", flush=True)  # in the log of the check, also if its time ends
            lines.append(line.rstrip())
    outcome = Outcome({"summary": lines[-1] if lines else "no output"})
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED", "ERROR"))]
    outcome.failures += [line[:300] for line in failed]
    outcome.require(done.returncode == 0 or bool(failed), f"exit code {done.returncode}: {lines[-5:]}")
    return outcome
