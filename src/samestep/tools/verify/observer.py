"""Observation of a script from outside: batches, calls of divided modules, losses, and steps of optimizers."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.launcher.job import process_state
from samestep.launcher.worker import EndOfScript
from samestep.script.calls import is_divisible
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


class Observer:
    """Writes one line of JSON for each step of an optimizer, and applies interventions.

    A note of a step has the events since the step before: batches of loaders, outermost calls of
    the modules that the script gives to `samestep.parallel`, or of all modules, losses of
    backwards, then the gradients and the state of the optimizer.

    Args:
        trial: the trial.
        rank: this rank.
        size: number of ranks.
        file: file of the notes.
        ends_script: whether the script ends after the steps of the trial.

    Attributes:
        rank: this rank.
        last_event: time of the last note, in seconds of the monotonic clock.
    """

    def __init__(
        self, trial: Trial, rank: int, size: int, file: TextIO, *, ends_script: bool
    ) -> None:
        self._trial = trial
        self.rank = rank
        self._size = size
        self._file = file
        self._most_steps = trial.steps if ends_script else None
        self._interventions = ModelInterventions(trial.interventions, trial.accuracy)
        self._tensors = StepTensors(trial.folder, trial.reference, keeps=rank == 0)
        self._labels: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._outermost: Mapping[str, Any] | None = (
            None  # options of the modules of an unchanged script
        )
        self._modules = 0  # that were observed
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._process = os.getpid()
        self._eps = 0.0  # accuracy of the least accurate weights
        self._is_inside = False  # of a call of a module
        self._steps: int | None = (
            None  # None before the first call: a resumption continues after some step
        )
        self._begin_step()
        self.last_event = time.monotonic()

    def install(self) -> None:
        """Observe this process; permanent, since a trial has its own processes."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        process_state.observe_module = self._add_module
        backward = torch.autograd.backward

        @wraps(backward)
        def observed_backward(tensors: Any, *arguments: Any, **options: Any) -> None:
            if not self._is_inside and torch._C._current_graph_task_id() == -1:
                roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                self._losses += [float(root.detach()) for root in roots if root.numel() == 1]
            backward(tensors, *arguments, **options)

        torch.autograd.backward = observed_backward
        for name in _CLIPPING:
            clipping = self._observed_clipping(name, getattr(nn.utils, name))
            setattr(nn.utils, name, clipping)
            setattr(sys.modules["torch.nn.utils.clip_grad"], name, clipping)

    def observe_calls(self, outermost: Mapping[str, Any] | None = None) -> None:
        """Observe calls of modules; permanent.

        Args:
            outermost: options of division, to observe the outermost calls of all modules with
                parameters; None for the modules that the script gives to `samestep.parallel`.
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
        """Write one line, and flush the file: a killed rank leaves the lines of all earlier events."""
        self.last_event = time.monotonic()
        self._file.write(json.dumps({"kind": kind, **facts}, default=str) + "\n")
        self._file.flush()

    def add_batch(self, indices: Any, data: Any, *, is_last: bool) -> None:
        """Note a batch of a loader: indices of its samples if they are known, hashes of its data, end of the epoch."""
        if os.getpid() != self._process:
            return
        self.last_event = time.monotonic()
        _, first = next(
            ((path, leaf) for path, leaf in leaves(data) if isinstance(leaf, torch.Tensor)),
            ("", None),
        )
        rows = len(first) if first is not None and first.dim() else 0
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

    def end(self, kind: str, **facts: Any) -> None:
        """Note the end of the script, regular or not, with the events since the last step and the divided calls."""
        view = process_state.view
        summaries = [] if view is None else view.modules
        device = torch.device("cpu") if process_state.world is None else process_state.world.device
        is_gpu = is_accelerator(device)
        self._write_step(
            kind,
            step=(self._steps or 0) + 1,
            eps=self._eps,
            device=accelerator_module().get_device_name(device) if is_gpu else "cpu",
            summaries=[
                {
                    name: getattr(summary, name)
                    for name in ("module", "divided", "watched", "whole", "reasons")
                }
                for summary in summaries
            ],
            **facts,
        )

    # --- modules and calls
    # -------------------------------------------------------------------------

    def _add_module(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Note an argument of `samestep.parallel`."""
        if module in self._labels:
            return
        self._interventions.prepare(module)
        floating = [
            parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()
        ]
        self._eps = max([self._eps, *(torch.finfo(dtype).eps for dtype in floating)])
        is_unchanged = self._outermost is not None
        if is_unchanged and self._modules:
            gc.collect()  # the state has no modules of which only cycles are left
        self._modules += 1
        label = type(module).__name__ + (f" {self._modules}" if self._modules > 1 else "")
        self._labels[module] = label
        before = {} if is_unchanged else _digests(self._state())
        self.write("module", {"name": label, "options": dict(options), "before": before})

    def _is_own(self, module: nn.Module) -> bool:
        """Whether a call is one of the script, of an observed module, and not part of another call."""
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
        key = f"{'evaluation' if is_evaluation else 'call'} {number}"
        with self._interventions.call(
            module, (arguments, options), self._steps or 0, number
        ) as inputs:
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

    # --- steps
    # -------------------------------------------------------------------------------------

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
                killed = self._trial.killed
                self._steps = 0 if killed is None else steps_before(killed, self._before)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._begin()
        assert self._steps is not None
        if self._most_steps is not None and self._steps >= self._most_steps:
            if process_state.world is not None:
                process_state.world.barrier()  # no rank ends while another needs it
            raise EndOfScript
        if self._trial.kill_at == self._steps + 1 and self.rank == self._size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self._interventions.before_step(optimizer, self._steps)
        named = self._parameters(optimizer)
        gradients = self._complete(
            {name: one.grad for name, one in named.items() if one.grad is not None}
        )
        self._of_optimizer = {
            "rates": [float(group["lr"]) for group in optimizer.param_groups],
            "settings": [*self._clippings, *map(_settings, optimizer.param_groups)],
            "gradients": _digests(gradients),
            "norm": sum(float(full(value).double().square().sum()) for value in gradients.values())
            ** 0.5,
        }
        self._tensors.add("gradients", gradients)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        assert self._steps is not None
        self._steps += 1
        named = self._parameters(optimizer)
        state = {**named, **self._state()}
        slots = {
            f"{name}/{slot}": value
            for name, parameter in named.items()
            for slot, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        slots = self._complete(slots)
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
        """Return the parameters of an optimizer by name."""
        references = [reference() for reference in self._optimizers]
        if not any(other is optimizer for other in references):
            self._optimizers.append(weakref.ref(optimizer))
            references.append(optimizer)
        number = next(
            index for index, other in enumerate(references, start=1) if other is optimizer
        )
        names = {id(parameter): name for name, parameter in self._named(nn.Module.named_parameters)}
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        return {
            names.get(id(parameter), f"parameter {index} of optimizer {number}"): parameter
            for index, parameter in enumerate(parameters)
        }

    def _named(
        self, entries: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]
    ) -> list[tuple[str, Any]]:
        """Return named tensors of all observed modules; those after the first have the class in the name."""
        result: dict[
            int, tuple[str, Any]
        ] = {}  # by identity: calls of a module and of its parts may be observed
        for module, label in list(self._labels.items()):
            prefix = f"{label}: " if " " in label else ""
            for name, value in entries(module):
                if not nn.parameter.is_lazy(value):
                    result.setdefault(id(value), (prefix + name, value))
        return list(result.values())

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the parameters and the persistent buffers of all observed modules, by name; a collective."""
        state = dict(self._named(nn.Module.named_parameters)) | dict(
            self._named(_persistent_buffers)
        )
        return self._complete(state)

    def _complete(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return values of parameters by `NAME` or `NAME/SLOT`, complete if ranks have parts of a module.

        A collective for such modules.
        """
        result = dict(values)
        for module, label in list(self._labels.items()):
            split = split_of(module)
            if split is not None:
                prefix = f"{label}: " if " " in label else ""
                parameters = {
                    prefix + name: parameter for name, parameter in module.named_parameters()
                }
                own: dict[str, dict[str, torch.Tensor]] = {}
                for key, value in values.items():
                    name, _, slot = key.partition("/")
                    if name in parameters:
                        own.setdefault(name, {})[slot] = value
                for name, slot, full in split.full_values(parameters, own):
                    result[f"{name}/{slot}" if slot else name] = full
        return result

    def _observed_clipping(self, name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(clip)
        def observed(parameters: Any, *arguments: Any, **options: Any) -> Any:
            numbers = [
                float(value)
                for value in (*arguments, *options.values())
                if isinstance(value, int | float)
            ]
            self._clippings.append({name: numbers})
            return clip(parameters, *arguments, **options)

        return observed


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        for key, buffer in part.named_buffers(recurse=False):
            if key not in part._non_persistent_buffers_set:
                yield (f"{path}.{key}" if path else key), buffer


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest_any(value) for name, value in state.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group, except for its learning rate; a checkpoint turns tuples into lists."""
    numbers = {
        key: value for key, value in group.items() if isinstance(value, float | int | tuple | list)
    }
    return {
        key: value for key, value in numbers.items() if key not in ("params", "lr", "initial_lr")
    }
