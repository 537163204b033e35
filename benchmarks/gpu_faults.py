"""Checks of the reports of faults: rank, code and seconds, while other ranks wait for the faulty one."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_ranks import launch, most_ranks, trainings
from gpu_training import CLASSES, Outcome, Plan, build_training, joined, step, train

from samestep.distributed.world import World
from samestep.launcher.failure import RankError

FAULTY = 1  # rank
PLAN = Plan("small", 8)


@dataclass(frozen=True)
class Fault:
    """Expected report.

    Attributes:
        code: code of the error.
        kinds: names of possible exceptions; empty for any.
        repeats: number of trials on a GPU: two threads may notice an error of the device first.
        needs_gpu: whether the fault has no meaning on a CPU.
    """

    code: str
    kinds: tuple[str, ...] = ()
    repeats: int = 1
    needs_gpu: bool = False


FAULTS = {
    "kill": Fault("E_RANK_KILLED"),
    "exception": Fault("E_RANK_FAILED", ("ValueError",)),
    "label": Fault("E_RANK_FAILED", ("IndexError", "AcceleratorError", "RuntimeError"), repeats=3),
    "memory": Fault("E_RANK_FAILED", ("OutOfMemoryError",), needs_gpu=True),
    "stop": Fault("E_HANG"),
    "skip": Fault("E_HANG"),
}


def faults(device: str) -> Outcome:
    """Reports of all faults."""
    outcome = Outcome()
    for name, fault in FAULTS.items():
        if device == "cpu" and fault.needs_gpu:
            continue
        _report(outcome, name, name, PLAN, device)
        if device == "cuda":
            for number in range(1, fault.repeats):
                _report(outcome, f"{name}, again {number}", name, PLAN, device)
    return outcome


def resumed(device: str) -> Outcome:
    """Reports of faults that end a rank, and a resumption after a kill on another number of ranks."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        plan = replace(PLAN, steps=4)
        saved = replace(plan, folder=Path(folder), save_after=2)
        _report(outcome, "kill", "kill", saved, device)
        _report(outcome, "label", "label", plan, device)
        if device == "cuda":
            _report(outcome, "memory", "memory", plan, device)
        with outcome.attempt("resumption"):
            (whole,) = launch(trainings, [plan], device, ranks=1).results
            (after,) = launch(trainings, [replace(saved, save_after=None, resume=True)], device, ranks=2).results
            digests = {"1 rank": whole.digest, "resumed": after.digest}
            outcome.require_one("resumed on 2 ranks after a kill among 3", digests)
    return outcome


def _report(outcome: Outcome, key: str, name: str, plan: Plan, device: str) -> None:
    """Launch ranks of which one fails, and compare the report with the expected one."""
    fault = FAULTS[name]
    hang_after = 20 if device == "cuda" else 6
    began = time.monotonic()
    try:
        launch(failing, plan, name, device, ranks=min(3, most_ranks(device)), hang_after=hang_after)
    except RankError as error:
        failure = error.failure
        outcome.numbers[key] = {
            "rank": failure.rank,
            "code": failure.code,
            "kind": failure.kind,
            "signal": failure.by_signal,
            "seconds": round(time.monotonic() - began, 1),
            "title": failure.title[:200],
        }
        is_expected = failure.code == fault.code and (not fault.kinds or failure.kind in fault.kinds)
        expected = f"{fault.code} of rank {FAULTY}"
        outcome.require(failure.rank == FAULTY and is_expected, f"{key}: expected {expected}: {str(error)[:600]}")
    else:
        outcome.failures.append(f"{key}: the launch did not fail")
    print(key, outcome.numbers.get(key), flush=True)  # in the log of the check, also if its time ends


def failing(plan: Plan, fault: str, device: Any) -> None:
    """Train two steps, and further ones with a fault in one rank; a function for `samestep.launch`."""
    with joined(device) as world:
        train(replace(plan, steps=2), world)
        is_faulty = world.rank == FAULTY
        if is_faulty:
            _fail(fault, world)
        model, optimizer = build_training(plan, world)
        inputs = torch.ones(plan.batch_size, 3, 32, 32, device=world.device)
        targets = torch.zeros(plan.batch_size, dtype=torch.long, device=world.device)
        if is_faulty and fault == "label":
            targets += CLASSES
        for _ in range(plan.steps):
            step(model, optimizer, inputs, targets, plan)


def _fail(fault: str, world: World) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exception":
        raise ValueError("planted")
    if fault == "skip":
        time.sleep(3600)
    if fault == "memory":
        free, total = torch.get_device_module(world.device).mem_get_info(world.device)
        torch.empty(total + free, dtype=torch.uint8, device=world.device)
