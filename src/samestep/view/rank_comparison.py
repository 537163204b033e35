"""Comparison of facts that must be equal on all ranks: one hash; names after a difference.

Facts are cheap: samples of tensors, states of generators, numbers of modules and optimizers. Their
hash is equal in all processes.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from samestep.distributed.collective_check import Line, script_line
from samestep.distributed.device_reads import device_reads
from samestep.distributed.kernels import KERNEL_SETTINGS, kernel_settings
from samestep.distributed.rng import numpy_generator, python_generator, torch_generator
from samestep.errors import RankMismatchError
from samestep.view.leaves import SAMPLE, hash_of, sample_of
from samestep.view.module_state import NUMBERS, ModuleState, lists_of

_WHOLE_BYTES = 2**16  # of smaller tensors on CPUs all values are compared: 20 us
_SUM_BYTES = 2**20  # of those below, a sum: 100 us
_SAMPLED_BYTES = 2**11  # as `_WHOLE_BYTES`, of tensors of which many exist: 10 us
_MOST_FACTS = 1000
# Facts that stay unequal once they are, such as weights, are compared in the first calls and steps,
# and later in one of eight: they are half of the cost of the comparison.
_ALWAYS = 64
_EVERY = 8
_MODULES = 16  # with lists
_CALLS_OF_LISTS = 256  # calls after which lists of submodules and attributes are made again

_CALL = "a call of a module"
_SHAPES = "arguments of the module"
_VALUES = "values of the batch"
_SAMPLES = "samples of a batch"
_ATTRIBUTES = "mode or number of a module"
_FORWARD = "value that the forward names"
_BUFFERS = "buffers"
_PARAMETERS = "parameters"
_STATES = "states of the optimizer"
_SETTINGS = "settings of torch"
_GENERATORS = "random generators"
_LOSS = "the gradient of the loss"
_RATES = "numbers of the optimizer"
_GRADIENTS = "gradients"
_SAMPLED = (_PARAMETERS, _STATES, _GRADIENTS)
_EARLIER = "earlier calls"

_BATCH = "E_RANK_BATCH"
_SETTING = "E_RANK_SETTINGS"
_MISMATCH = "E_RANK_MISMATCH"
_SHARED = ": samestep.all_gather(value)[0] is the value of rank 0"
# What ranks do that decide in another way.
ONE_DECISION = (
    "let no decision of the script depend on the rank, the time or the machine: "
    "samestep.all_gather(decision)[0] is that of rank 0 on all ranks, and samestep.request_stop() "
    "on one rank ends the loops of all after the same step"
)
_KERNELS = "on GPUs by operations with deterministic kernels"
_CODES_AND_FIXES = {
    _SHAPES: (_BATCH, "give every rank the same whole batch; only calls of modules are divided"),
    _SAMPLES: (
        _BATCH,
        "seed the sampler alike on every rank, and do not divide the data among ranks",
    ),
    _VALUES: (
        _BATCH,
        "read and shuffle data from the same seed on every rank, without a sampler of ranks",
    ),
    _ATTRIBUTES: (_SETTING, f"set modes and numbers of modules alike on every rank{_SHARED}"),
    _FORWARD: (_SETTING, f"set it alike on every rank{_SHARED}"),
    _SETTINGS: (_SETTING, "set torch's precision, benchmark and determinism alike on every rank"),
    _RATES: (_SETTING, f"set optimizers and schedules alike on every rank{_SHARED}"),
    _STATES: (_MISMATCH, "change or load states of optimizers on every rank"),
    _BUFFERS: (_MISMATCH, "write buffers alike on every rank"),
    _PARAMETERS: (_MISMATCH, "change or load weights on every rank"),
    _GENERATORS: (_MISMATCH, "seed and draw alike on every rank, also in code of one rank only"),
    _LOSS: (
        _MISMATCH,
        f"compute the loss from the same values on every rank{_SHARED}; {_KERNELS}",
    ),
    _GRADIENTS: (_MISMATCH, f"change gradients alike on every rank, {_KERNELS}"),
}
# A place that a rank may reach alone, and the fix then.
SAVE = "torch.save of divided parameters"
SAVE_FIX = "weights = samestep.full_state_dict(model) on every rank, then save them on rank 0"
_OTHER_PATH = ("E_RANK_DESYNC", ONE_DECISION)


class _Fact(NamedTuple):
    name: str
    value: int
    line: Line
    detail: Callable[[], Any] | None  # named values, looked up after a difference


class InStep:
    """Facts that must be equal on all ranks, since the last exchange.

    A hash of the facts travels in the words of a call, which are sent anyway. All ranks decide
    alike from the words, and end with the same error.

    Args:
        all_gather_text: returns the texts of all ranks; it is called after a difference only.
        is_alone: there are no other ranks, so that facts of calls are not collected.

    Attributes:
        seeds: line and value of the last seed, by function that seeds a global generator.
        has_equal_parameters: no rank holds or computes a part of a module.
    """

    def __init__(self, all_gather_text: Callable[[str], list[str]], *, is_alone: bool) -> None:
        self.seeds: dict[str, tuple[Line, str]] = {}
        self.has_equal_parameters = True
        self._is_alone = is_alone
        self._all_gather_text = all_gather_text
        self._facts: list[_Fact] = []
        self._sent: list[_Fact] = []
        # Values that arrive from accelerators: of the last event, and of the one before.
        self._arriving: list[tuple[str, Tensor, torch.Event, Line]] = []
        self._late: list[tuple[str, Tensor, torch.Event, Line]] = []
        self._states: WeakSet[ModuleState] = WeakSet()  # with lists
        self._calls = 0
        self._steps = 0

    def facts_of_call(
        self,
        module: nn.Module,
        state: ModuleState,
        leaves: Sequence[Any],
        settings: Callable[[], list[tuple[str, Any]]] | None = None,
    ) -> None:
        """Add the facts of a call.

        Args:
            module: the module.
            state: its numbers and tensors.
            leaves: its flattened arguments, of the whole batch.
            settings: returns plain values that the code of the forward names.
        """
        if self._is_alone:
            return
        line = self._begin()
        self._calls += 1
        kind = f"call {self._calls}: {type(module).__qualname__}"
        self._add(_CALL, zlib.crc32(kind.encode()), line, lambda: kind)
        shapes = str([_description(leaf) for leaf in leaves])
        self._add(_SHAPES, zlib.crc32(shapes.encode()), line, lambda: shapes)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._add_values(_VALUES, leaf, line)
        self._add_state_of(module, state, line)
        if settings is not None:
            values = settings()
            self._add(_FORWARD, zlib.crc32(repr(values).encode()), line, lambda: dict(values))
        if _has_turn(self._calls):
            kernels = kernel_settings()
            named = zip(KERNEL_SETTINGS, kernels, strict=True)
            self._add(_SETTINGS, zlib.crc32(repr(kernels).encode()), line, lambda: dict(named))
            self._add(_GENERATORS, hash((torch_generator(), numpy_generator())), line)

    def facts_of_backward(self, gradients: Iterable[Tensor | None]) -> None:
        """Add the gradients of a call's outputs, which stand for the loss."""
        if self._is_alone:
            return
        line = self._begin()
        for gradient in gradients:
            if gradient is None:
                self._add(_LOSS, 0, line)
            else:
                self._add_values(_LOSS, gradient, line)

    def facts_of_step(
        self, optimizer: torch.optim.Optimizer, *, has_equal_gradients: bool = True
    ) -> None:
        """Add numbers of an optimizer, and if ranks have the same gradients, of two of them."""
        line = self._begin()
        groups = [_numbers_of_group(group) for group in optimizer.param_groups]
        numbers = array("d", list(chain.from_iterable(group.values() for group in groups)))

        def named() -> dict[str, float]:
            pairs = enumerate(groups)
            names = [f"{key} of group {index}" for index, group in pairs for key in group]
            return dict(zip(names, numbers, strict=True))

        self._add(_RATES, zlib.crc32(numbers), line, named)
        self._steps += 1
        if not _has_turn(self._steps):
            return
        gradients: list[Tensor | None] = []
        if has_equal_gradients:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            gradients = [parameter.grad for parameter in parameters]
            self._add_state(optimizer, parameters, line)
        pattern = bytes([gradient is not None for gradient in gradients])
        flags = enumerate(pattern)
        self._add(
            _GRADIENTS,
            zlib.crc32(pattern),
            line,
            lambda: {f"is there number {index}": flag for index, flag in flags},
        )
        existing = [gradient for gradient in gradients if gradient is not None]
        if existing:
            self._add_values(_GRADIENTS, existing[0], line)
            self._add_values(_GRADIENTS, existing[self._steps % len(existing)], line)
        self._add(_GENERATORS, python_generator(), line)

    def _add_state(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], line: Line
    ) -> None:
        """Add the number of states of an optimizer, and one tensor of them, each in turn."""
        state = optimizer.state
        count = len(state)
        self._add(_STATES, count, line, lambda: {"parameters with a state": count})
        if parameters:
            turn, index = divmod(self._steps, len(parameters))
            own = state.get(parameters[index], {})
            tensors = []
            if isinstance(own, dict):
                tensors = [value for value in own.values() if isinstance(value, Tensor)]
            if tensors:
                self._add_values(_STATES, tensors[turn % len(tensors)], line)

    def fact_of_samples(self, samples: int) -> None:
        """Add a hash of the indices of a batch; no values of accelerators are awaited."""
        self._add(_SAMPLES, samples, script_line(sys._getframe(1)))

    def fact_of_place(self, name: str) -> None:
        """Add that this rank has reached a place that the other ranks may not have reached."""
        self._add(name, 0, self._begin())

    def digest(self) -> int:
        """Return a hash of the facts since the last one, a signed integer of 64 bits."""
        self._sent = self._facts
        self._facts = []
        return hash(tuple(fact.value for fact in self._sent))

    def compare(self, digests: Sequence[int]) -> None:
        """Compare the hashes of all ranks.

        Raises:
            RankMismatchError: the first fact that differs, equal on all ranks.
        """
        if len(set(digests)) == 1:
            return
        own = [_sent(fact) for fact in self._sent]
        own_seeds = {
            f"{name} of {file}:{line}": value for name, ((file, line), value) in self.seeds.items()
        }
        texts = self._all_gather_text(json.dumps([own, own_seeds], default=str))
        ranks, seeds = zip(*map(json.loads, texts), strict=True)
        rows = zip_longest(*ranks, fillvalue=["nothing further", 0, "", 0, None])
        pairs = ((facts[0], rank, fact) for facts in rows for rank, fact in enumerate(facts))
        unequal = (_difference(*pair) for pair in pairs if pair[0][:2] != pair[2][:2])
        error = next(unequal, None)
        if error is None:  # a rank has written parameters, such as an average, and put them back
            return
        other = next((rank for rank, one in enumerate(seeds) if one != seeds[0]), None)
        if other is None:
            raise error
        cause = RankMismatchError(
            f"ranks 0 and {other} have different seeds{_unequal(seeds[0], seeds[other])}",
            expected="the same seeds on every rank",
            fix="a number as seed; or no seed at all: "
            "generators without one are equal on all ranks of samestep run",
            code=_SETTING,
        )
        cause.add_note(error.value)
        raise cause

    def _begin(self) -> Line:
        """Add values of the event before the last one; return the line of the script.

        Those of the last event may still wait for work of an accelerator: the gradients at a step
        of an optimizer are added when the next forward has been launched, so that the accelerator
        always has work.
        """
        late = self._late
        self._late = self._arriving
        self._arriving = []
        for name, values, event, line in late:
            with device_reads.waiting(event.device):
                event.synchronize()
            self._add(name, hash_of(values), line)
        line = script_line(sys._getframe(2))
        # Calls without a message, as in an evaluation that is computed whole.
        if len(self._facts) > _MOST_FACTS:
            self._facts = [
                _Fact(_EARLIER, hash(tuple(one.value for one in self._facts)), line, None)
            ]
        return line

    def _add(
        self, name: str, value: int, line: Line, detail: Callable[[], Any] | None = None
    ) -> None:
        self._facts.append(_Fact(name, value, line, detail))

    def _add_values(self, name: str, tensor: Tensor, line: Line) -> None:
        """Add values of a tensor; its shape if other rows are elsewhere or it has no memory.

        Of a larger tensor the sampled values differ from call to call. Values of accelerators are
        added two events later, so that the host does not wait.
        """
        is_on_cpu = tensor.device.type == "cpu"
        size = tensor.numel() * tensor.element_size()
        whole = _WHOLE_BYTES
        if name in _SAMPLED:
            whole = _SAMPLED_BYTES
        most = SAMPLE
        if is_on_cpu and size <= whole:
            most = max(2, tensor.numel())
        sample = sample_of(tensor, most, self._calls)
        if sample is None:
            shape = str(_description(tensor))
            self._add(name, zlib.crc32(shape.encode()), line, lambda: shape)
        elif is_on_cpu:
            self._add(name, hash_of(sample), line, sample.flatten().tolist)
            has_sum = name not in _SAMPLED and whole < size <= _SUM_BYTES
            if has_sum and tensor.is_contiguous():
                words = tensor.detach().flatten().view(torch.uint8)
                words = words[: len(words) // 8 * 8].view(torch.int64)
                self._add(name, int(words.sum()), line)
        else:
            values = sample.to("cpu", non_blocking=True)
            event = torch.Event(sample.device)
            event.record()
            self._arriving.append((name, values, event, line))

    def forget_lists(self) -> None:
        """Forget the lists of modules, which keep those alive that refer to themselves."""
        for state in self._states:
            state.lists = None
        self._states.clear()

    def _add_state_of(self, module: nn.Module, state: ModuleState, line: Line) -> None:
        is_full = state.lists is None and len(self._states) >= _MODULES
        if is_full or self._calls % _CALLS_OF_LISTS == 0:
            self.forget_lists()
        if state.lists is None:
            state.lists = lists_of(module)
            self._states.add(state)
        lists = state.lists
        try:
            values = chain.from_iterable([get(values) for values, get in lists.attributes])
            numbers = array("d", list(values))  # faster than from an iterator
            written = lists.buffers.versions()
        except (KeyError, TypeError, AttributeError, RuntimeError):
            # boundary: a number or buffer is something else now
            state.lists = None
            self._add(_ATTRIBUTES, 0, line)
            return
        named = zip(lists.attribute_names, numbers, strict=True)
        self._add(_ATTRIBUTES, zlib.crc32(numbers), line, lambda: dict(named))
        writes = zip(lists.buffers.names, written, strict=True)
        self._add(
            _BUFFERS,
            zlib.crc32(written),
            line,
            lambda: {f"number of writes of {name}": count for name, count in writes},
        )
        compared = [(_BUFFERS, lists.buffers), (_ATTRIBUTES, lists.tensors)]
        if self.has_equal_parameters and _has_turn(self._calls):
            compared.append((_PARAMETERS, lists.parameters))
            before = lists.versions
            versions = lists.parameters.versions()
            since = array("q", [new - old for new, old in zip(versions, before, strict=True)])
            # Ranks that have not written alike compare all values.
            self._add(_PARAMETERS, zlib.crc32(since), line, lists.parameters.contents)
            before[:] = versions
        for name, tensors in compared:
            if tensors.places:
                values_of, key = tensors.places[self._calls % len(tensors.places)]
                self._add_values(name, values_of[key], line)


def _has_turn(number: int) -> bool:
    """Whether all facts are compared in a call or step; each of several optimizers has turns."""
    return number <= _ALWAYS or hash((number,)) % _EVERY == 0


def _description(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (*leaf.shape, leaf.dtype)
    if isinstance(leaf, bool | int | float | str | None):
        return leaf
    return type(leaf).__qualname__


def _sent(fact: _Fact) -> list[Any]:
    """Return a fact for other ranks; parameters that were not written alike may be equal."""
    value = fact.value
    detail = fact.detail and fact.detail()
    if fact.name == _PARAMETERS and isinstance(detail, dict):
        value = zlib.crc32(repr(detail).encode())
    return [fact.name, value, *fact.line, detail]


def _numbers_of_group(group: dict[str, Any]) -> dict[str, float]:
    numbers = {}
    for key, value in group.items():
        if type(value) in NUMBERS:
            numbers[key] = value
        elif type(value) in (tuple, list) and key != "params":
            for index, one in enumerate(value):
                if type(one) in NUMBERS:
                    numbers[f"{key}[{index}]"] = one
        elif isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            numbers[key] = value.item()
    return numbers


def _difference(first: list[Any], rank: int, other: list[Any]) -> RankMismatchError:
    """Return the error of a fact (name, hash, file, line, named values) that differs."""
    name, *_, first_values = first
    other_name, *_, other_values = other
    # Without a script, as in a recipe, the outermost line is that of the fork server.
    places = [f"{fact[2]}:{fact[3]}" for fact in (first, other) if fact[2] not in ("", "<string>")]
    lines = " and ".join(dict.fromkeys(places))
    code, fix = _OTHER_PATH
    if name != other_name:
        value = f"rank 0 reached {name} while rank {rank} reached {other_name}"
        if SAVE in (name, other_name):
            fix = SAVE_FIX
    else:
        value = f"ranks 0 and {rank} differ in: {name}{_unequal(first_values, other_values)}"
        code, fix = _CODES_AND_FIXES.get(name, _OTHER_PATH)
    return RankMismatchError(
        f"{value}{lines and ', at '}{lines}",
        "every rank runs the same script with equal values",
        fix,
        code=code,
    )


def _unequal(one: Any, other: Any) -> str:
    """Return the first two values that differ, with their name if they have one."""
    text = f" ({one} and {other})"
    if one is None:
        text = ""
    elif isinstance(one, dict) and isinstance(other, dict):
        names = [name for name in (*one, *other) if one.get(name) != other.get(name)]
        text = ""
        if names:
            text = f": {names[0]} is {one.get(names[0])} and {other.get(names[0])}"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [f" ({a} and {b})" for a, b in zip(one, other, strict=True) if a != b]
        text = (pairs or [""])[0]
    return text
