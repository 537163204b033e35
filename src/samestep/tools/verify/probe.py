"""Writes down what one rank of a trial computes, step by step."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NoReturn, TextIO

import torch
from torch.nn.modules.batchnorm import _NormBase

from samestep.config import StepRules
from samestep.data.batch import GlobalBatch, Shard
from samestep.engine.held import optimizer_tensors
from samestep.engine.loss import Loss
from samestep.engine.observer import Observed, Observer
from samestep.engine.result import StepResult
from samestep.runtime.random_state import preserved_generators
from samestep.tools.verify.additive import additivity
from samestep.tools.verify.collectives import CollectiveCount
from samestep.tools.verify.digest import digest, digest_any, digest_rows
from samestep.tools.verify.holding import Holding
from samestep.tools.verify.memory import Remembered, memory_of
from samestep.tools.verify.plan import Trial
from samestep.tools.verify.values import Values, state_tensors

Noted = dict[str, Any]


class EnoughSteps(BaseException):
    """Ends a subject that has done the steps that were asked for, or was asked to end; no script catches it."""


class Probe(Observer):
    """One line of JSON for each stage, so that a rank that is killed leaves what it did until then.

    Attributes:
        last_event: seconds of the monotonic clock when the engine last told of something.
        was_stopped: somebody asked the run to end, and it did after a step.
    """

    def __init__(self, trial: Trial, rank: int, size: int, file: TextIO, *, ends_script: bool = False) -> None:
        self._trial, self._rank, self._size, self._file = trial, rank, size, file
        self._enough = trial.steps if ends_script else None
        self._holding = Holding(trial.held)
        self._collectives = CollectiveCount()
        self._values = Values(trial, rank)
        self._shards: dict[int, Noted] = {}
        self._parts: dict[int, tuple[Shard, Any]] = {}
        self._modules: dict[int, list[tuple[str, str]]] = {}
        self._memory: dict[str, str] = {}
        self._step: Noted = {}
        self.last_event = time.monotonic()
        self.was_stopped = False

    def note(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Write one line."""
        self.last_event = time.monotonic()
        line = json.dumps({"kind": kind, **facts}, default=str)
        self._file.write(line + "\n")
        self._file.flush()

    def prepare(self, model: torch.nn.Module, rules: StepRules) -> StepRules:
        rules = self._holding.prepare(model, rules)
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))
        return rules

    def made(self, engine: Observed) -> None:
        world = engine.world
        # A rank that does something else than the others is told from the others at once, instead of hanging.
        world.roll_call.begin(0)
        is_gpu = world.device.type == "cuda"
        self.note(
            "engine",
            {
                "rank": world.rank,
                "size": world.size,
                "device": torch.cuda.get_device_name(world.device) if is_gpu else "cpu",
                "strategy": engine.strategy,
                "rules": asdict(engine.rules),
                "modules": {name: type(module).__name__ for name, module in engine.model.named_modules()},
                "parameters": [name for name, _ in engine.model.named_parameters()],
                "norms": [name for name, module in engine.model.named_modules() if isinstance(module, _NormBase)],
                "averaged": sorted(self._holding.averaged),
            },
        )

    def begin_step(self, engine: Observed, batch: GlobalBatch) -> None:
        if self._enough is not None and engine.steps >= self._enough:
            self._leave(engine)
        self._holding.begin_step(engine)
        self._shards, self._parts, self._modules = {}, {}, {}
        self._memory = _memory_digests(memory_of(engine.model, self._holding.averaged))
        self._step = {
            "step": engine.steps + 1,
            "epoch": batch.begin.epoch,
            "ends_epoch": batch.end.epoch > batch.begin.epoch,
            "order": [int(index) for index in batch.indices],
            "shards_of_batch": batch.shards,
            "rates": [float(group["lr"]) for group in engine.optimizer.param_groups],
            "settings": [_settings(group) for group in engine.optimizer.param_groups],
            "threads": torch.get_num_threads(),
            "before": _digests(_state(engine)),
        }

    def begin_shard(self, part: Shard) -> None:
        if self._trial.kill_at == self._step["step"] and self._rank == self._size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self._holding.begin_shard(self._step["step"], part)
        self._collectives.begin()
        self._modules[threading.get_ident()] = []

    def end_shard(self, part: Shard, outputs: Any, loss: Loss) -> None:
        self._parts[part.number] = (part, outputs)
        self._shards[part.number] = {
            "size": part.size,
            "inputs": digest_any(part.data[0]),
            "targets": digest_any(part.data[1]),
            "rows": digest_rows(part.data[0], part.size),
            "modules": self._modules.pop(threading.get_ident(), []),
            "collectives": self._collectives.end(),
            "outputs": digest_any(outputs),
            "sum": float(loss.sum.detach()),
            "count": float(loss.count),
        }

    def end_gradients(self, engine: Observed) -> None:
        mine = {name: {"": p.grad} for name, p in engine.pieces.held.items() if p.grad is not None}
        gradients = {name: whole for (name, _), whole in _whole(engine, mine).items()}
        self._step["gradients"] = _digests(gradients)
        self._values.add("gradients", gradients)

    def end_step(self, engine: Observed, result: StepResult) -> None:
        state = _state(engine)
        mine: dict[str, dict[str, torch.Tensor]] = {}
        for (name, slot), value in optimizer_tensors(engine.pieces.held, engine.optimizer).items():
            mine.setdefault(name, {})[slot] = value
        slots = {f"{name}/{slot}": whole for (name, slot), whole in _whole(engine, mine).items()}
        memory = _memory_digests(memory_of(engine.model, self._holding.averaged))
        self._values.add("outputs", {str(shard): outputs for shard, (_, outputs) in self._parts.items()})
        self._values.add("state", state)
        self._values.add("optimizer", slots)
        self.note(
            "step",
            {
                **self._step,
                "shards": self._shards,
                "loss": result.loss,
                "count": result.count,
                "grad_norm": result.grad_norm,
                "skipped": result.skipped,
                "after": _digests(state),
                "optimizer": _digests(slots),
                "remembered": [name for name, now in memory.items() if self._memory.get(name) != now],
                "distances": self._values.settle(result.step),
            },
        )
        if self._trial.cuts_losses:
            with preserved_generators(engine.world.device):
                for part, outputs in self._parts.values():
                    self.note("additivity", {"step": result.step, **additivity(engine.loss, outputs, part)})
        if result.stop:
            self.was_stopped = True
            self._leave(engine)

    def _leave(self, engine: Observed) -> NoReturn:
        engine.world.barrier()  # ranks leave in step
        raise EnoughSteps

    def end_evaluation(self, engine: Observed, values: dict[str, float]) -> None:
        state = _digests(_state(engine))
        shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self.note("evaluation", {"step": engine.steps, "values": shown, "before": state})

    def _hook(self, name: str) -> Callable[..., None]:
        def note(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
            noted = self._modules.get(threading.get_ident())
            if noted is not None and torch.is_grad_enabled():
                noted.append((name, digest_any(outputs)))

        return note


def _state(engine: Observed) -> dict[str, torch.Tensor]:
    """What a checkpoint would hold of the model; where ranks divide it, all of them call this."""
    pieces = engine.pieces
    return state_tensors(engine.model) | {name: pieces.whole(name, p.detach()) for name, p in pieces.held.items()}


def _whole(engine: Observed, mine: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[tuple[str, str], torch.Tensor]:
    """What belongs to parameters, from what each rank has of it; where ranks divide them, all of them call this."""
    everywhere = engine.pieces.everywhere(mine)
    return {
        (n, slot): engine.pieces.whole(n, value) for n, slots in everywhere.items() for slot, value in slots.items()
    }


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def _memory_digests(memory: Mapping[str, Remembered]) -> dict[str, str]:
    return {name: digest(value) if isinstance(value, torch.Tensor) else repr(value) for name, value in memory.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of a parameter group besides its learning rate; pairs of them come out of a checkpoint as lists."""
    numbers = {key: value for key, value in group.items() if isinstance(value, float | int | tuple | list)}
    return {key: value for key, value in numbers.items() if key not in ("params", "lr", "initial_lr")}
