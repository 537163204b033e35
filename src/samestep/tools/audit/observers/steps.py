"""Observer of optimizer steps: samples of parameters, gradients and buffers, learning rates and schedules."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.tools.audit.events import user_line
from samestep.tools.audit.observers.session import Session

_TENSORS = 8  # of a step
_FIRST_TENSORS = 64  # of the first and the last step
_VALUES = 1024  # of a tensor
_FINALIZE_PRIORITY = 100  # before the temporary files of multiprocessing


class _Schedule:
    """Counts of the steps of one scheduler."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.name = type(scheduler).__name__
        self.period = getattr(scheduler, "T_max", None)
        self.steps = 0
        self.since_update = 0
        self.per_update: Counter[int] = Counter()  # scheduler steps between two optimizer steps
        self.zero_updates = 0  # optimizer steps with a learning rate of zero
        self.updates = 0
        self.line = ""


class StepObserver:
    """Observer of the optimizers, schedulers and `DistributedDataParallel` modules of a process."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._optimizer_count = 0
        self._before: weakref.WeakKeyDictionary[Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._schedules: weakref.WeakKeyDictionary[Optimizer, dict[int, _Schedule]] = weakref.WeakKeyDictionary()
        self._all_schedules: list[_Schedule] = []
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._finalized_pid = 0
        self._evaluations = 0

    def begins(self, optimizer: Optimizer) -> None:
        """Observe the parameters and learning rates before an optimizer step."""
        step = self._session.steps
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = self._optimizer_count
            self._optimizer_count += 1
        if self._session.is_observed:
            self._before[optimizer] = self._parameters(optimizer, step, _TENSORS if step else _FIRST_TENSORS)

    def ends(self, optimizer: Optimizer) -> None:
        """Write the state of an optimizer step; a closure computes the gradients during the step."""
        before = self._before.pop(optimizer, None)
        if before is not None:
            gradients = self._gradients(optimizer, before["values"])
            number = self._optimizers[optimizer]
            self._session.emit("update", optimizer=number, **before, gradients=gradients, line=user_line())
        self._session.optimizer = self._optimizers[optimizer]
        self._count_schedules(optimizer)
        self._finalize_process()
        self._session.steps += 1

    def schedules(self, scheduler: LRScheduler) -> None:
        """Count a step of a scheduler."""
        optimizer = scheduler.optimizer
        schedules = self._schedules.setdefault(optimizer, {})
        if id(scheduler) not in schedules:
            schedules[id(scheduler)] = _Schedule(scheduler)
            self._all_schedules.append(schedules[id(scheduler)])
            return  # the step of the constructor
        schedule = schedules[id(scheduler)]
        schedule.steps += 1
        schedule.since_update += 1
        schedule.line = schedule.line or user_line()

    def replicates(self, model: DistributedDataParallel) -> None:
        """Store the parameters whose gradients `DistributedDataParallel` reduces."""
        size = torch.distributed.get_world_size()
        if model.process_group.size() != size:
            return
        self._replicas.add(model)
        ignored = set(model.parameters_to_ignore)
        for name, parameter in model.module.named_parameters():
            if name not in ignored:
                self._names[id(parameter)] = (weakref.ref(parameter), name)

    def evaluates(self) -> None:
        """At the begin of a pass, observe the buffers of the next forward if the model is in evaluation mode."""
        for model in self._replicas:
            module = model.module
            if module.training or not any(True for _ in module.buffers()):
                continue
            handles: list[Any] = []

            def observe(module: torch.nn.Module, _: Any, handles: list[Any] = handles) -> None:
                # A hook that stays would be part of a saved or copied module.
                handles.pop().remove()
                self._observe_buffers(module)

            handles.append(module.register_forward_pre_hook(observe))

    def _observe_buffers(self, module: torch.nn.Module) -> None:
        if module.training:
            return
        self._evaluations += 1
        buffers = [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]
        values = {name: _summary(buffer) for name, buffer in buffers[:_FIRST_TENSORS]}
        self._session.emit("evaluation", number=self._evaluations, buffers=values, line=user_line())

    def _count_schedules(self, optimizer: Optimizer) -> None:
        for schedule in self._schedules.get(optimizer, {}).values():
            if schedule.updates:
                schedule.per_update[schedule.since_update] += 1
            schedule.since_update = 0
            schedule.updates += 1
            schedule.zero_updates += all(group.get("lr") == 0 for group in optimizer.param_groups)

    def _parameters(self, optimizer: Optimizer, step: int, count: int) -> dict[str, Any]:
        """Return summaries of some parameters; each step selects others."""
        named = self._named_parameters(optimizer)
        names = list(named)
        indices = sorted({(step * count + i) % len(names) for i in range(min(count, len(names)))})
        return {
            "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "replicated": all(self._is_replicated(p) for p in named.values() if p.requires_grad),
            "hooked": any(model._comm_hooks for model in self._replicas),
            "shapes": [[name, list(parameter.shape)] for name, parameter in named.items()][:_FIRST_TENSORS],
            "values": {names[i]: _summary(named[names[i]]) for i in indices},
        }

    def _gradients(self, optimizer: Optimizer, names: Iterable[str]) -> dict[str, list[float] | None]:
        named = self._named_parameters(optimizer)
        return {name: _summary(named[name].grad) for name in names}

    def _named_parameters(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {self._name(i, parameter): parameter for i, parameter in enumerate(parameters)}

    def _is_replicated(self, parameter: torch.Tensor) -> bool:
        reference, _ = self._names.get(id(parameter), (None, ""))
        return reference is not None and reference() is parameter

    def _name(self, index: int, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)][1] if self._is_replicated(parameter) else f"parameter {index}"

    def _finalize_process(self) -> None:
        """Write the last state when the process ends, with `multiprocessing` too, which runs no `atexit` functions."""
        if os.getpid() != self._finalized_pid:
            self._finalized_pid = os.getpid()
            Finalize(None, self._session.guarded(self._write_end), exitpriority=_FINALIZE_PRIORITY)

    def _write_end(self) -> None:
        session = self._session
        for optimizer, number in self._optimizers.items():
            session.emit("end", optimizer=number, **self._parameters(optimizer, 0, _FIRST_TENSORS))
        for schedule in self._all_schedules:
            session.emit("schedule", optimizers=self._optimizer_count, **_description(schedule))


def observe_steps(session: Session) -> Callable[..., None]:
    """Observe all optimizers, schedulers and `DistributedDataParallel` modules.

    Returns:
        A function to call when a loader begins a pass: it observes the buffers of an evaluation.
    """
    observer = StepObserver(session)
    begins, ends = session.guarded(observer.begins), session.guarded(observer.ends)
    schedules = session.guarded(observer.schedules)
    replicates = session.guarded(observer.replicates)
    register_optimizer_step_pre_hook(lambda optimizer, *_: begins(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: ends(optimizer))
    scheduler: Any = LRScheduler
    replica: Any = DistributedDataParallel
    step, init = scheduler.step, replica.__init__

    def observed_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        schedules(self)
        return step(self, *args, **kwargs)

    def observed_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        replicates(self)

    scheduler.step = observed_step
    replica.__init__ = observed_init
    return session.guarded(observer.evaluates)


def _description(schedule: _Schedule) -> dict[str, Any]:
    names = ("name", "period", "steps", "updates", "zero_updates", "line")
    gaps = {str(count): number for count, number in schedule.per_update.items()}
    return {name: getattr(schedule, name) for name in names} | {"per_update": gaps}


def _summary(tensor: torch.Tensor | None) -> list[float] | None:
    """Return norm and sum of the first values of a tensor, or None for tensors that cannot be compared."""
    is_plain = tensor is not None and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if tensor is None or not is_plain or tensor.layout != torch.strided or not tensor.is_floating_point():
        return None
    values = tensor.detach().flatten()[:_VALUES].double()
    return torch.stack([values.norm(), values.sum()]).tolist()
