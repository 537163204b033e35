"""Observers of optimizer steps and schedules, and of modules in evaluations."""

from __future__ import annotations

import os
import weakref
import zlib
from collections import Counter
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samestep.tools.audit.events import user_line
from samestep.tools.audit.session import Session

_FIRST_STEPS = 50  # of all optimizers, observed one by one
_INTERVAL = 50  # steps between observations after the first ones
_TENSORS = 8  # of a step
_FIRST_TENSORS = 64  # of the first and the last step, and of a module in an evaluation
_MODULES = 8  # of an evaluation
_FINALIZE_PRIORITY = 100  # before the temporary files of multiprocessing
_VALUES = 1024  # of a tensor
_SCHEDULE_FACTS = ("name", "period", "steps", "updates", "zero_updates", "line")

Values = Mapping[str, torch.Tensor | None]
Summaries = dict[str, list[float] | None]


def is_observed(step: int) -> bool:
    """Whether tensors of a step are observed."""
    return step < _FIRST_STEPS or step % _INTERVAL == 0


class _Schedule:
    """Counts of the steps of one scheduler."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler  # alive: another one would get the same `id`
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
        self._before: weakref.WeakKeyDictionary[Optimizer, dict[str, Any]]
        self._before = weakref.WeakKeyDictionary()
        self._schedules: weakref.WeakKeyDictionary[Optimizer, dict[int, _Schedule]]
        self._schedules = weakref.WeakKeyDictionary()
        self._all_schedules: list[_Schedule] = []
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._finalized_pid = 0

    def begins(self, optimizer: Optimizer) -> None:
        """Observe the parameters and learning rates before an optimizer step."""
        step = self._session.steps
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = self._optimizer_count
            self._optimizer_count += 1
        if is_observed(self._session.steps):
            count = _TENSORS if step else _FIRST_TENSORS
            self._before[optimizer] = self._parameters(optimizer, step, count)

    def ends(self, optimizer: Optimizer) -> None:
        """Write the state of an optimizer step; a closure computes the gradients during it."""
        session = self._session
        number = self._optimizers[optimizer]
        before = self._before.pop(optimizer, None)
        if before is not None:
            tensors = before.pop("tensors").items()
            gradients = _first_values({name: tensor.grad for name, tensor in tensors})
            before["values"], before["gradients"] = _summaries(before["values"], gradients)
            session.emit("update", optimizer=number, **before, line=user_line())
        session.optimizer = number
        for schedule in self._schedules.get(optimizer, {}).values():
            if schedule.updates:
                schedule.per_update[schedule.since_update] += 1
            schedule.since_update = 0
            schedule.updates += 1
            schedule.zero_updates += all(group.get("lr") == 0 for group in optimizer.param_groups)
        if os.getpid() != self._finalized_pid:
            # At the end of the process, also of multiprocessing, which runs no `atexit` functions.
            self._finalized_pid = os.getpid()
            Finalize(None, session.guarded(self._write_end), exitpriority=_FINALIZE_PRIORITY)
        session.steps += 1

    def schedules(self, scheduler: LRScheduler, *_: Any, **__: Any) -> None:
        """Count a step of a scheduler."""
        schedules = self._schedules.setdefault(scheduler.optimizer, {})
        if id(scheduler) not in schedules:
            schedules[id(scheduler)] = _Schedule(scheduler)
            self._all_schedules.append(schedules[id(scheduler)])
            return  # the step of the constructor
        schedule = schedules[id(scheduler)]
        schedule.steps += 1
        schedule.since_update += 1
        schedule.line = schedule.line or user_line()

    def replicates(self, _: None, model: DistributedDataParallel, *__: Any, **___: Any) -> None:
        """Store the parameters with gradients that `DistributedDataParallel` reduces."""
        # A smaller group reduces among some ranks; the rules compare all.
        if model.process_group.size() != torch.distributed.get_world_size():
            return
        self._replicas.add(model)
        ignored = set(model.parameters_to_ignore)
        for name, parameter in model.module.named_parameters():
            if name not in ignored:
                self._names[id(parameter)] = (weakref.ref(parameter), name)

    def _parameters(self, optimizer: Optimizer, step: int, count: int) -> dict[str, Any]:
        """Return first values of some parameters; each step selects others."""
        named: dict[str, torch.Tensor] = {}
        is_replicated = True
        groups = optimizer.param_groups
        parameters: list[torch.Tensor] = [one for group in groups for one in group["params"]]
        for i, one in enumerate(parameters):
            # An id can belong to another tensor by now.
            reference, name = self._names.get(id(one), (None, ""))
            if reference is not None and reference() is one:
                named[name] = one
            else:
                named[f"parameter {i}"] = one
                is_replicated &= not one.requires_grad  # frozen ones need no reduction
        names = list(named)
        indices = sorted({(step * count + i) % len(names) for i in range(min(count, len(names)))})
        tensors = {names[i]: named[names[i]] for i in indices}
        shapes = repr([(name, list(one.shape)) for name, one in named.items()])
        return {
            "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "replicated": is_replicated,
            "hooked": any(model._comm_hooks for model in self._replicas),
            "shapes": zlib.crc32(shapes.encode()),
            "tensors": tensors,
            "values": _first_values(tensors),
        }

    def _write_end(self) -> None:
        session = self._session
        for optimizer, number in self._optimizers.items():
            state = self._parameters(optimizer, 0, _FIRST_TENSORS)
            del state["tensors"]
            [values] = _summaries(state.pop("values"))
            session.emit("end", optimizer=number, **state, values=values)
        for schedule in self._all_schedules:
            facts = {name: getattr(schedule, name) for name in _SCHEDULE_FACTS}
            gaps = {str(count): number for count, number in schedule.per_update.items()}
            session.emit("schedule", optimizers=self._optimizer_count, **facts, per_update=gaps)


def observe_steps(session: Session) -> None:
    """Observe all optimizers, schedulers and `DistributedDataParallel` modules."""
    observer = StepObserver(session)
    begins = session.guarded(observer.begins)
    ends = session.guarded(observer.ends)
    register_optimizer_step_pre_hook(lambda optimizer, *_: begins(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: ends(optimizer))
    session.observe(LRScheduler, "step", before=observer.schedules)
    session.observe(DistributedDataParallel, "__init__", after=observer.replicates)


class ModuleObserver:
    """Observer of the first call of each module in an evaluation.

    An average of the weights, a teacher, or the module inside of `DistributedDataParallel` is no
    replica whose gradients are reduced, and so can differ between ranks. An evaluation can begin
    after an optimizer step, or with a pass of a loader, and ends with a call in training. The hook
    of all modules exists in between only, since each call pays for it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hook: Any = None
        self._seen: set[int] = set()  # ids of modules, and of their parts
        self._count = 0
        self._compiles = False

    def begins(self) -> None:
        """Observe the next calls, unless the program compiles: a hook changes compiled code."""
        self._seen.clear()
        self._count = 0
        if self._hook is None and not self._compiles:
            self._hook = register_module_forward_pre_hook(self._session.guarded(self._called))

    def steps(self, *_: Any) -> None:
        """Observe the calls after an optimizer step whose tensors are observed."""
        if is_observed(self._session.steps):
            self.begins()

    def compiles(self, *_: Any, **__: Any) -> None:
        """End the observation: the program compiles modules."""
        self._compiles = True
        self._end()
        self._session.emit("compiled")

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _called(self, module: torch.nn.Module, _: Any) -> None:
        """Write values of a module, if it is not a part of one that has been called."""
        if id(module) in self._seen or _is_traced():
            return
        parameters = dict(module.named_parameters())
        buffers = {name: one for name, one in module.named_buffers() if one.is_floating_point()}
        if not parameters and not buffers:
            return
        if (module.training and torch.is_grad_enabled()) or self._count == _MODULES:
            self._end()
            return
        self._seen.add(id(module))
        # It sends its buffers to all ranks before it calls its inner module.
        parts = list(module.modules())
        if any(isinstance(part, DistributedDataParallel) for part in parts):
            return
        self._seen.update(map(id, parts))
        self._count += 1
        if module.training:
            buffers = {}  # of a forward in training: those of each rank
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        kinds = []
        for tensors in (parameters, buffers):
            names = [name for name in tensors if name not in ignored]
            kinds.append(_first_values({name: tensors[name] for name in names[:_FIRST_TENSORS]}))
        values, buffer_values = _summaries(*kinds)
        facts = {"values": values, "buffers": buffer_values, "module": type(module).__name__}
        self._session.emit("evaluation", **facts, line=user_line())


def observe_modules(session: Session) -> ModuleObserver:
    """Observe modules in evaluations; the observer's `begins` is also called before each pass."""
    observer = ModuleObserver(session)
    steps = session.guarded(observer.steps)
    register_optimizer_step_post_hook(lambda *_: steps())
    session.observe(torch, "compile", before=observer.compiles)
    return observer


def _first_values(tensors: Values) -> dict[str, torch.Tensor | None]:
    """Return copies of first values in float64, and None for tensors that cannot be compared."""
    result: dict[str, torch.Tensor | None] = {}
    for name, tensor in tensors.items():
        result[name] = None
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            continue
        assert tensor is not None
        if tensor.layout == torch.strided and tensor.is_floating_point() and tensor.numel():
            values = tensor.detach()
            if values.dim() > 1:
                # Rows first: to flatten a tensor that is not contiguous copies all of it.
                values = values[: 1 + _VALUES * len(values) // values.numel()]
            # Copied: the step changes parameters in place.
            result[name] = values.flatten()[:_VALUES].to(torch.float64, copy=True)
    return result


def _summaries(*parts: Values) -> list[Summaries]:
    """Return norm and sum of each result of `_first_values`."""
    values = [value for part in parts for value in part.values() if value is not None]
    if not values:
        return [dict.fromkeys(part) for part in parts]
    first = values[0]
    # One copy to the CPU for all tensors: each copy waits for the device.
    flat = torch.cat([value.to(first.device) for value in values]).cpu().numpy()
    starts = [0, *np.cumsum([len(value) for value in values])[:-1]]
    with np.errstate(all="ignore"):
        norms = np.sqrt(np.add.reduceat(flat * flat, starts))
        sums = np.add.reduceat(flat, starts)
    pairs = iter(zip(norms.tolist(), sums.tolist(), strict=True))
    return [
        {name: None if value is None else [*next(pairs)] for name, value in part.items()}
        for part in parts
    ]


def _is_traced() -> bool:
    """Whether operations are recorded or transformed, so that values cannot be read."""
    interpreters = torch._C._functorch.peek_interpreter_stack()
    is_traced = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return is_traced or interpreters is not None
