"""Observation of a script from outside: batches, calls of modules, losses, and optimizer steps."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import count
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.checkpoint.checksum import buffers_of
from samestep.data.own_rows import _OwnRowsIterator
from samestep.data.sample_reader import SampleReader
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.launcher.process_state import process_state
from samestep.launcher.worker import EndOfScript
from samestep.script.divided_calls import is_divisible
from samestep.strategies.divided_parameters import split_of
from samestep.tools.verify.interventions import ModelInterventions
from samestep.tools.verify.tensor_comparison import (
    StepTensors,
    digest_any,
    digest_rows,
    full,
    leaves,
)
from samestep.tools.verify.trials import Trial, steps_before

# Functions that change gradients between the backward and the step; their numbers are settings of
# the step.
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
_SUMMARY = ("module", "divided", "watched", "whole", "reasons")

Tensors = Mapping[str, torch.Tensor]


class Observer:
    """Writes one line of JSON for each step of an optimizer, and applies interventions.

    A note of a step has the events since the step before: batches of loaders, outermost calls of
    the modules that the script gives to `samestep.parallel`, or of all modules, losses of
    backwards, then the gradients and the state of the optimizer. With `ends_script`, the script
    ends after the steps of the trial.

    Attributes:
        rank: this rank.
    """

    def __init__(
        self, trial: Trial, rank: int, size: int, file: TextIO, *, ends_script: bool
    ) -> None:
        self._trial = trial
        self.rank = rank
        self._size = size
        self._file = file
        self._ends_script = ends_script
        self._interventions = ModelInterventions(trial.interventions, trial.accuracy)
        self._tensors = StepTensors(trial.folder, trial.reference, keeps=rank == 0)
        self._labels: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        # Options of the modules of an unchanged script.
        self._outermost: Mapping[str, Any] | None = None
        self._modules = 0  # that were observed
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._optimizer_numbers = count(1)
        self._process = os.getpid()
        self._eps = 0.0  # accuracy of the least accurate weights
        self._is_inside = False  # of a call of a module
        # None before the first call, since a resumption continues after some step.
        self._steps: int | None = None
        self._begin_step()

    def install(self) -> None:
        """Observe this process; permanent, since a trial has its own processes."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        process_state.observe_module = self._add_module
        backward = torch.autograd.backward

        @wraps(backward)
        def observed_backward(tensors: Any, *arguments: Any, **options: Any) -> None:
            # A backward within another, as of checkpointing, is not one of the script.
            if not self._is_inside and torch._C._current_graph_task_id() == -1:
                for root in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
                    # Other roots are no losses, and edges of the graph have no value.
                    if isinstance(root, torch.Tensor) and root.numel() == 1:
                        self._losses.append(float(root.detach()))
            backward(tensors, *arguments, **options)

        torch.autograd.backward = observed_backward
        for name in _CLIPPING:
            clipping = self._observed_clipping(name, getattr(nn.utils, name))
            # In both modules: scripts import from either.
            setattr(nn.utils, name, clipping)
            setattr(sys.modules["torch.nn.utils.clip_grad"], name, clipping)
        _observe_loaders(self._add_batch)

    def observe_calls(self, outermost: Mapping[str, Any] | None = None) -> None:
        """Observe calls of the modules that the script gives to `samestep.parallel`; permanent.

        With options of division, the outermost calls of all modules with parameters are observed.
        """
        self._outermost = outermost
        call = nn.Module.__call__

        @wraps(call)
        def observed(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_own(module):
                return call(module, *arguments, **options)
            return self._observe_call(call, module, arguments, options)

        nn.Module.__call__ = observed  # type: ignore[method-assign]

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Write one line, and flush the file: a killed rank leaves the lines of earlier events."""
        self._file.write(json.dumps({"kind": kind, **facts}, default=str) + "\n")
        self._file.flush()

    def end(self, kind: str, **facts: Any) -> None:
        """Note the end of the script, regular or not, with the events since the last step."""
        world = process_state.world
        device = "cpu"
        if world is not None and is_accelerator(world.device):
            device = accelerator_module().get_device_name(world.device)
        summaries = []
        if process_state.view is not None:
            for one in process_state.view.modules:
                summaries.append({name: getattr(one, name) for name in _SUMMARY})
        facts |= {"eps": self._eps, "device": device, "summaries": summaries}
        self._write_step(kind, step=(self._steps or 0) + 1, **facts)

    def _add_batch(self, indices: Any, data: Any, *, is_last: bool) -> None:
        """Note a batch of a loader, with hashes of its data."""
        # A forked process, such as a worker of a loader, is no rank.
        if os.getpid() != self._process:
            return
        tensors = (leaf for _, leaf in leaves(data) if isinstance(leaf, torch.Tensor))
        first = next(tensors, None)
        rows = 0
        if first is not None and first.dim():
            rows = len(first)
        batch = {
            "order": indices,
            "size": rows if indices is None else len(indices),
            "inputs": digest_any(first),
            "rows": digest_rows(first, rows),
            "targets": digest_any([leaf for _, leaf in leaves(data) if leaf is not first]),
            "is_last": is_last,
            "evaluation": False,
        }
        self._batches.append(batch)
        self._unused.append(batch)

    # --- modules and calls ----------------------------------------------------------------------

    def _add_module(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        if module in self._labels:
            return
        self._interventions.prepare(module)
        dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
        self._eps = max([self._eps, *(torch.finfo(dtype).eps for dtype in dtypes)])
        is_unchanged = self._outermost is not None
        if self._modules:
            # The state has no modules of which only cycles are left.
            if process_state.view is not None:
                process_state.view.in_step.forget_lists()
            gc.collect()
        self._modules += 1
        label = type(module).__name__
        if self._modules > 1:
            label = f"{label} {self._modules}"
        self._labels[module] = label
        before = {}
        if not is_unchanged:
            before = _digests(self._state())
        self.write("module", {"name": label, "options": dict(options), "before": before})

    def _is_own(self, module: nn.Module) -> bool:
        """Whether a call is one of the script, of an observed module, and not part of another."""
        # Inside of a backward, activation checkpointing calls modules again.
        is_part = self._is_inside or torch._C._current_graph_task_id() != -1
        if is_part or threading.current_thread() is not threading.main_thread():
            return False
        if self._outermost is not None and module not in self._labels and is_divisible(module):
            self._add_module(module, self._outermost)
        return module in self._labels

    def _observe_call(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        self._begin()
        is_evaluation = not (module.training and torch.is_grad_enabled())
        for batch in self._unused:
            batch["evaluation"] = is_evaluation
        self._unused.clear()
        number = sum(call["evaluation"] == is_evaluation for call in self._calls)
        key = f"evaluation {number}" if is_evaluation else f"call {number}"
        step = self._steps or 0
        with self._interventions.call(module, (arguments, options), step, number) as inputs:
            note = {"module": self._labels[module], "key": key, "evaluation": is_evaluation}
            note["arguments"] = digest_any(inputs)
            self._calls.append(note)
            self._tensors.add("arguments", {key: inputs})
            self._is_inside = True
            try:
                outputs = call(module, *inputs[0], **inputs[1])
            finally:
                self._is_inside = False
        note["outputs"] = digest_any(outputs)
        self._tensors.add("outputs", {key: outputs})
        return outputs

    # --- steps ----------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._before: dict[str, str] | None = None  # hashes of the state before the first call
        self._batches: list[dict[str, Any]] = []
        self._unused: list[dict[str, Any]] = []  # batches since the last call
        self._calls: list[dict[str, Any]] = []
        self._losses: list[float] = []
        self._clippings: list[dict[str, list[float]]] = []
        self._of_optimizer: dict[str, Any] = {}  # notes before the step of the optimizer

    def _begin(self) -> None:
        """Note the state before the first call after a step."""
        if self._before is None:
            self._before = _digests(self._state())
            if self._steps is None:
                self._steps = 0
                if self._trial.killed is not None:
                    self._steps = steps_before(self._trial.killed, self._before)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._begin()
        assert self._steps is not None
        is_last = self._trial.steps is not None and self._steps >= self._trial.steps
        # In the next step, so that an evaluation after the last one is recorded too.
        if self._ends_script and is_last:
            if process_state.world is not None:
                process_state.world.barrier()  # no rank ends while another needs it
            raise EndOfScript
        if self._trial.kill_at == self._steps + 1 and self.rank == self._size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self._interventions.before_step(optimizer, self._steps)
        named = self._parameters(optimizer).items()
        gradients = self._complete({name: one.grad for name, one in named if one.grad is not None})
        squares = sum(float(full(value).double().square().sum()) for value in gradients.values())
        self._of_optimizer = {
            "rates": [float(group["lr"]) for group in optimizer.param_groups],
            "settings": [*self._clippings, *map(_settings, optimizer.param_groups)],
            "gradients": _digests(gradients),
            "norm": squares**0.5,
        }
        self._tensors.add("gradients", gradients)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        assert self._steps is not None
        self._steps += 1
        named = self._parameters(optimizer)
        # `_state` last: complete tensors replace the parts of this rank.
        state = {**named, **self._state()}
        slots = self._complete(
            {
                f"{name}/{slot}": value
                for name, parameter in named.items()
                for slot, value in optimizer.state.get(parameter, {}).items()
                if isinstance(value, torch.Tensor)
            }
        )
        after = _digests(state)
        self._tensors.add("state", state)
        self._tensors.add("optimizer", slots)
        self._write_step(
            "step",
            step=self._steps,
            after=after,
            weights={name: after[name] for name, _ in self._named(nn.Module.named_parameters)},
            optimizer=_digests(slots),
        )
        # After the notes: the perturbation belongs to the next step.
        self._interventions.after_step(optimizer)

    def _write_step(self, kind: str, *, step: int, **facts: Any) -> None:
        """Write the events since the last step."""
        note = {
            "step": step,
            "before": self._before,
            "batches": self._batches,
            "calls": self._calls,
            "losses": self._losses,
            "threads": torch.get_num_threads(),
            "distances": self._tensors.end_step(step),
            **self._of_optimizer,
            **facts,
        }
        self._begin_step()
        self.write(kind, note)

    def _parameters(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = next(self._optimizer_numbers)
        number = self._optimizers[optimizer]
        names = {id(parameter): name for name, parameter in self._named(nn.Module.named_parameters)}
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        return {
            names.get(id(parameter), f"parameter {index} of optimizer {number}"): parameter
            for index, parameter in enumerate(parameters)
        }

    def _prefixed(self) -> list[tuple[nn.Module, str]]:
        """Return all observed modules; the names of those after the first begin with the class."""
        labels = list(self._labels.items())
        return [(module, f"{label}: " if " " in label else "") for module, label in labels]

    def _named(
        self, entries: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]
    ) -> list[tuple[str, Any]]:
        """Return named tensors of all observed modules, once each: modules share tensors."""
        result: dict[int, tuple[str, Any]] = {}
        for module, prefix in self._prefixed():
            for name, value in entries(module):
                if not nn.parameter.is_lazy(value):
                    result.setdefault(id(value), (prefix + name, value))
        return list(result.values())

    def _state(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers of all modules, by name; a collective."""
        parameters = self._named(nn.Module.named_parameters)
        buffers = self._named(lambda module: buffers_of(module).items())
        return self._complete(dict([*parameters, *buffers]))

    def _complete(self, values: Tensors) -> dict[str, torch.Tensor]:
        """Return values of parameters by `NAME` or `NAME/SLOT`, those of parts of ranks complete.

        A collective for modules with such parts.
        """
        result = dict(values)
        for module, prefix in self._prefixed():
            split = split_of(module)
            if split is not None:
                parameters = {prefix + name: one for name, one in module.named_parameters()}
                own: dict[str, dict[str, torch.Tensor]] = {}
                for key, value in values.items():
                    name, _, slot = key.partition("/")
                    if name in parameters:
                        own.setdefault(name, {})[slot] = value
                for name, slot, complete in split.full_values(parameters, own):
                    result["/".join(filter(None, (name, slot)))] = complete
        return result

    def _observed_clipping(self, name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(clip)
        def observed(parameters: Any, *arguments: Any, **options: Any) -> Any:
            values = (*arguments, *options.values())
            numbers = [
                float(value) for value in values if isinstance(value, int | float | torch.Tensor)
            ]
            self._clippings.append({name: numbers})
            return clip(parameters, *arguments, **options)

        return observed


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest_any(value) for name, value in state.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group, except for its learning rate."""
    # Lists too: a checkpoint turns tuples into lists.
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, float | int | tuple | list)
        and key not in ("params", "lr", "initial_lr")
    }


def _observe_loaders(add_batch: Callable[..., None]) -> None:
    """Call `add_batch(indices, data, is_last=...)` for each batch of a loader; permanent.

    Iterators of torch ask for indices in the order of their batches, also ahead for workers. Those
    of Samestep read own rows and complete them to batches.
    """
    next_index: Callable[..., Any] = _BaseDataLoaderIter._next_index
    next_batch: Callable[..., Any] = _BaseDataLoaderIter.__next__
    next_whole: Callable[..., Any] = _OwnRowsIterator.__next__
    reset: Callable[..., Any] = _BaseDataLoaderIter._reset

    def add(iterator: Any, data: Any) -> None:
        indices = iterator._read_indices
        if not isinstance(indices, list | tuple):
            indices = [indices]
        try:
            indices = [int(index) for index in indices]
        except (TypeError, ValueError):  # keys of another type
            indices = None
        try:
            is_last = iterator._num_yielded >= len(iterator)
        except TypeError:  # the loader does not know its length
            is_last = False
        add_batch(indices, data, is_last=is_last)

    def observed_reset(self: Any, *arguments: Any, **options: Any) -> None:
        self._asked_indices = deque()  # without those of an unfinished pass
        reset(self, *arguments, **options)

    def observed_index(self: Any) -> Any:
        indices = next_index(self)
        self.__dict__.setdefault("_asked_indices", deque()).append(indices)
        return indices

    def observed_batch(self: Any) -> Any:
        data = next_batch(self)
        asked = self.__dict__.get("_asked_indices")
        self._read_indices = asked.popleft() if asked else None
        is_probe = isinstance(self._dataset, SampleReader)  # of a resumption, and no batch
        if not isinstance(self, _OwnRowsIterator) and not is_probe:
            add(self, data)
        return data

    def observed_whole(self: Any) -> Any:
        # Calls are nested after a batch without a usable sample.
        is_nested = self.__dict__.get("_is_observed", False)
        self._is_observed = True
        try:
            data = next_whole(self)
        finally:
            self._is_observed = is_nested
        if not is_nested:
            add(self, data)
        return data

    _BaseDataLoaderIter._reset = observed_reset  # type: ignore[method-assign]
    _BaseDataLoaderIter._next_index = observed_index  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = observed_batch  # type: ignore[method-assign]
    _OwnRowsIterator.__next__ = observed_whole  # type: ignore[method-assign]
