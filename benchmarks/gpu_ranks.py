"""Checks with several ranks: bits, divided models, and the tests with the marker `gpu`.

Ranks have a GPU each, or share the first one, by gloo or NCCL, as `SAMESTEP_SHARE_GPU` says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_training import Outcome, Plan, Trained, distance, joined, train

import samestep
from samestep.config import MeshConfig, StrategyConfig
from samestep.distributed.env import read_environment

SHARING_RANKS = 4  # on a CPU or a shared GPU
MOST_RANKS = 8
STRATEGIES = {
    "fsdp": (StrategyConfig(name="fsdp"), 2),
    "hsdp": (StrategyConfig(name="hsdp", mesh=MeshConfig(replicate=2, shard=2)), 4),
    "tp": (StrategyConfig(name="tp"), 2),
    "pp of 2": (StrategyConfig(name="pp", mesh=MeshConfig(pipeline=2)), 2),
    "pp of 4": (StrategyConfig(name="pp", mesh=MeshConfig(pipeline=4)), 4),
    "ddp of 2 x pp of 2": (StrategyConfig(name="pp", mesh=MeshConfig(replicate=2, pipeline=2)), 4),
}


def launch(function: Any, *arguments: Any, ranks: int, hang_after: float = 60, **options: Any) -> Any:
    """Return the result of rank 0."""
    preload = (function.__module__,)
    return samestep.launch(function, *arguments, processes=ranks, preload=preload, hang_after=hang_after, **options)


def most_ranks(device: str) -> int:
    """Return the largest number of ranks of a check."""
    if device == "cpu" or read_environment().sharing is not None:
        return SHARING_RANKS
    return min(torch.cuda.device_count(), MOST_RANKS)


def expected_backend(device: str) -> str:
    """Return the name of the backend for tensors of a device."""
    return "gloo" if device == "cpu" else read_environment().sharing or "nccl"


@dataclass(frozen=True)
class Trainings:
    """Results of a rank.

    Attributes:
        backend: name of the backend for tensors of the device.
    """

    results: list[Trained]
    backend: str


def trainings(plans: list[Plan], device: Any, strategy: StrategyConfig | None = None) -> Trainings:
    """Train all plans; a function for `samestep.launch`."""
    with joined(device, strategy, plans[0].reduction) as world:
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(world.device).name()
        return Trainings([train(plan, world) for plan in plans], backend)


def bits(device: str) -> Outcome:
    """One digest of a training under `exact` on all numbers of ranks."""
    outcome = Outcome()
    models = ("resnet18", "tokens", "gpt", "small") if device == "cuda" else ("tokens", "small")
    plans = {model: Plan(model, MOST_RANKS) for model in models}
    plans["gpt, bf16"] = Plan("gpt", MOST_RANKS, is_bf16=True)
    digests: dict[str, dict[str, str]] = {name: {} for name in plans}
    for ranks in range(1, most_ranks(device) + 1):
        began = time.monotonic()
        with outcome.attempt(f"{ranks} ranks"):
            found = launch(trainings, list(plans.values()), device, ranks=ranks)
            for name, result in zip(plans, found.results, strict=True):
                digests[name][f"{ranks} ranks"] = result.digest
            _require_backend(outcome, f"{ranks} ranks", found.backend, device)
            outcome.numbers[f"{ranks} ranks, seconds"] = round(time.monotonic() - began, 1)
    for name, by_ranks in digests.items():
        outcome.require_one(name, by_ranks)
    return outcome


def layouts(device: str) -> Outcome:
    """Divided models in float64 under `fast`, compared with one rank."""
    outcome = Outcome()
    # Under `fast`, the random numbers of one rank on a GPU are those of a plain loop, and others on several ranks.
    plan = [Plan("gpt without dropout", 4, is_double=True, reduction="fast")]
    (expected,) = launch(trainings, plan, device, ranks=1).results
    for name, (strategy, ranks) in STRATEGIES.items():
        if ranks > most_ranks(device):
            outcome.numbers[name] = f"needs {ranks} ranks"
            continue
        if "pp" in name and expected_backend(device) == "gloo" and device == "cuda":
            outcome.numbers[name] = "needs NCCL"
            continue
        with outcome.attempt(name):
            found = launch(trainings, plan, device, strategy, ranks=ranks)
            difference = distance(found.results[0].weights, expected.weights)
            outcome.numbers[f"{name}, difference from 1 rank"] = difference
            outcome.require(difference < 1e-10, f"{name}: weights differ from those of one rank by {difference:.1e}")
            _require_backend(outcome, name, found.backend, device)
    return outcome


def _require_backend(outcome: Outcome, name: str, backend: str, device: str) -> None:
    expected = expected_backend(device)
    outcome.numbers["backend"] = backend
    outcome.require(backend == expected, f"{name}: the backend is {backend}, not {expected}")


def shared(device: str) -> Outcome:
    """`bits` and `layouts`."""
    outcome = bits(device)
    divided = layouts(device)
    return Outcome({**outcome.numbers, **divided.numbers}, outcome.failures + divided.failures)


def tests(device: str) -> Outcome:
    """The tests with the marker `gpu`."""
    if device == "cpu":
        return Outcome(skipped="the tests with the marker gpu need a GPU")
    root = Path(__file__).parents[1]
    workers = max(1, min(10, (os.cpu_count() or 1) // 2))
    options = ["-v", "--tb", "short", "--durations", "10", "-p", "no:cacheprovider", "-m", "gpu", "-n", str(workers)]
    options += ["-W", "default"]  # other versions of torch have other warnings
    # Not all tests: modules of others need packages that the machine may lack.
    files = ["tests/gpu", "tests/unit/data/test_batch.py", "tests/unit/checkpoint/test_background_writer.py"]
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
