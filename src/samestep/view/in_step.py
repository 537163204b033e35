"""Comparison of facts that must be equal on all ranks: one hash; names after a difference.

Facts are cheap: samples of tensors, states of generators, numbers of modules and optimizers. Their
hash is equal in all processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import sysconfig
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from numpy.random.mtrand import get_bit_generator
from torch import Tensor, nn

from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import KERNEL_SETTINGS, kernel_settings
from samestep.errors import RankMismatchError

Line = tuple[str, int]  # file and number

_SAMPLE = 32  # values of a tensor that are compared
_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_MOST_FACTS = 1000
_MODULES = 16  # with lists
_CALLS_OF_LISTS = 256  # calls after which lists of submodules and attributes are made again
_NUMBERS = (bool, int, float)

_CALL = "a call of a module"
_SHAPES = "arguments of the module"
_VALUES = "values of the batch"
_SAMPLES = "samples of a batch"
_ATTRIBUTES = "mode or number of a module"
_BUFFERS = "buffers"
_SETTINGS = "settings of torch"
_GENERATORS = "random generators"
_LOSS = "the gradient of the loss"
_RATES = "numbers of the optimizer"
_GRADIENTS = "gradients"
_EARLIER = "earlier calls"

_BATCH = "E_RANK_BATCH"
_SETTING = "E_RANK_SETTINGS"
_MISMATCH = "E_RANK_MISMATCH"
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
    _ATTRIBUTES: (_SETTING, "set modes and numbers of modules alike on every rank"),
    _SETTINGS: (_SETTING, "set torch's precision, benchmark and determinism alike on every rank"),
    _RATES: (_SETTING, "set optimizers and schedules alike on every rank"),
    _BUFFERS: (_MISMATCH, "write buffers alike on every rank"),
    _GENERATORS: (_MISMATCH, "seed and draw alike on every rank, also in code of one rank only"),
    _LOSS: (_MISMATCH, f"compute the loss from the same values on every rank, {_KERNELS}"),
    _GRADIENTS: (_MISMATCH, f"change gradients alike on every rank, {_KERNELS}"),
}
# A place that a rank may reach alone, and the fix then.
SAVE = "torch.save of divided parameters"
SAVE_FIX = "weights = samestep.full_state_dict(model) on every rank, then save them on rank 0"
_OTHER_PATH = (
    "E_RANK_DESYNC",
    "let no decision of the script depend on the rank, the time or the machine",
)


class _Fact(NamedTuple):
    name: str
    value: int
    line: Line
    detail: Callable[[], Any] | None  # named values, looked up after a difference


class _Lists(NamedTuple):
    """Compared facts of a module: dictionaries that hold numbers and buffers, with their names."""

    attributes: list[tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[Any, ...]]]]
    attribute_names: list[str]
    buffers: list[tuple[dict[str, Any], str]]
    buffer_names: list[str]


class InStep:
    """Facts that must be equal on all ranks, since the last exchange.

    A hash of the facts travels in the words of a call, which are sent anyway. All ranks decide
    alike from the words, and end with the same error.

    Args:
        all_gather_text: returns the texts of all ranks; it is called after a difference only.
        is_alone: there are no other ranks, so that facts of calls are not collected.

    Attributes:
        seeds: line and value of the last seed, by function that seeds a global generator.
    """

    def __init__(self, all_gather_text: Callable[[str], list[str]], *, is_alone: bool) -> None:
        self.seeds: dict[str, tuple[Line, str]] = {}
        self._is_alone = is_alone
        self._all_gather_text = all_gather_text
        self._facts: list[_Fact] = []
        self._sent: list[_Fact] = []
        # Values that arrive from accelerators: of the last event, and of the one before.
        self._arriving: list[tuple[str, Tensor, torch.Event, Line]] = []
        self._late: list[tuple[str, Tensor, torch.Event, Line]] = []
        self._lists: WeakKeyDictionary[nn.Module, _Lists] = WeakKeyDictionary()
        self._calls = 0

    def facts_of_call(self, module: nn.Module, leaves: Sequence[Any]) -> None:
        """Add the facts of a call; `leaves` are its flattened arguments, of the whole batch."""
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
        self._add_state_of(module, line)
        settings = kernel_settings()
        named = zip(KERNEL_SETTINGS, settings, strict=True)
        self._add(_SETTINGS, zlib.crc32(repr(settings).encode()), line, lambda: dict(named))
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
        """Add numbers of an optimizer, and if ranks have the same gradients, samples of some."""
        line = self._begin()
        groups = [_numbers_of_group(group) for group in optimizer.param_groups]
        numbers = array("d", list(chain.from_iterable(group.values() for group in groups)))

        def named() -> dict[str, float]:
            pairs = enumerate(groups)
            names = [f"{key} of group {index}" for index, group in pairs for key in group]
            return dict(zip(names, numbers, strict=True))

        self._add(_RATES, zlib.crc32(numbers), line, named)
        gradients: list[Tensor | None] = []
        if has_equal_gradients:
            for group in optimizer.param_groups:
                gradients += [parameter.grad for parameter in group["params"]]
        pattern = bytes([gradient is not None for gradient in gradients])
        flags = enumerate(pattern)
        self._add(
            _GRADIENTS,
            zlib.crc32(pattern),
            line,
            lambda: {f"is there number {index}": flag for index, flag in flags},
        )
        existing = [gradient for gradient in gradients if gradient is not None]
        for gradient in existing[:: max(1, len(existing) // 3)]:
            self._add_values(_GRADIENTS, gradient, line)
        self._add(_GENERATORS, python_generator(), line)

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
        own = [
            [fact.name, fact.value, *fact.line, fact.detail and fact.detail()]
            for fact in self._sent
        ]
        own_seeds = {
            f"{name} of {file}:{line}": value for name, ((file, line), value) in self.seeds.items()
        }
        texts = self._all_gather_text(json.dumps([own, own_seeds], default=str))
        ranks, seeds = zip(*map(json.loads, texts), strict=True)
        rows = zip_longest(*ranks, fillvalue=["nothing further", 0, "", 0, None])
        pairs = ((facts[0], rank, fact) for facts in rows for rank, fact in enumerate(facts))
        error = next(_difference(*pair) for pair in pairs if pair[0][:2] != pair[2][:2])
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
        """Add some values of a tensor; its shape if other rows are elsewhere or it has no memory.

        Values of accelerators are added two events later, so that the host does not wait.
        """
        sample = sample_of(tensor)
        if sample is None:
            shape = str(_description(tensor))
            self._add(name, zlib.crc32(shape.encode()), line, lambda: shape)
        elif sample.device.type == "cpu":
            self._add(name, hash_of(sample), line, sample.tolist)
        else:
            values = sample.to("cpu", non_blocking=True)
            event = torch.Event(sample.device)
            event.record()
            self._arriving.append((name, values, event, line))

    def _add_state_of(self, module: nn.Module, line: Line) -> None:
        lists = self._lists.get(module)
        if lists is None or self._calls % _CALLS_OF_LISTS == 0:
            if len(self._lists) >= _MODULES:
                self._lists.clear()  # a submodule that refers to the module would keep it alive
            lists = self._lists[module] = _lists_of(module)
        try:
            values = chain.from_iterable([get(values) for values, get in lists.attributes])
            numbers = array("d", list(values))  # faster than from an iterator
            versions = array("q", [buffers[name]._version for buffers, name in lists.buffers])
        except (KeyError, TypeError, AttributeError, RuntimeError):
            # boundary: a number or buffer is something else now
            del self._lists[module]
            self._add(_ATTRIBUTES, 0, line)
            return
        named = zip(lists.attribute_names, numbers, strict=True)
        self._add(_ATTRIBUTES, zlib.crc32(numbers), line, lambda: dict(named))
        writes = zip(lists.buffer_names, versions, strict=True)
        self._add(_BUFFERS, zlib.crc32(versions), line, lambda: dict(writes))
        if lists.buffers:
            buffers, name = lists.buffers[self._calls % len(lists.buffers)]
            self._add_values(_BUFFERS, buffers[name], line)


def _description(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (*leaf.shape, leaf.dtype)
    if isinstance(leaf, bool | int | float | str | None):
        return leaf
    return type(leaf).__qualname__


def _lists_of(module: nn.Module) -> _Lists:
    lists = _Lists([], [], [], [])
    for prefix, one in module.named_modules():
        values = vars(one)
        names = [name for name, value in values.items() if type(value) in _NUMBERS]
        names = [name for name in names if name[0] != "_"] or ["training"]  # two give a tuple
        lists.attributes.append((values, itemgetter("training", *names)))
        lists.attribute_names.extend(
            f"{prefix}.{name}".lstrip(".") for name in ["training", *names]
        )
        for name, buffer in one._buffers.items():
            is_lazy = buffer is None or nn.parameter.is_lazy(buffer)
            if buffer is not None and not is_lazy and not buffer.is_inference():
                lists.buffers.append((one._buffers, name))
                lists.buffer_names.append(f"number of writes of {prefix}.{name}")
    return lists


def _numbers_of_group(group: dict[str, Any]) -> dict[str, float]:
    numbers = {}
    for key, value in group.items():
        if type(value) in _NUMBERS:
            numbers[key] = value
        elif type(value) in (tuple, list) and key != "params":
            for index, one in enumerate(value):
                if type(one) in _NUMBERS:
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


# --- cheap hashes, equal in all processes -----------------------------------------------------


def sample_of(tensor: Tensor, most: int = _SAMPLE) -> Tensor | None:
    """Return up to `most` values in one dimension; None for tensors without plain memory."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    count = tensor.numel()
    if not is_plain or not count or tensor.is_quantized or tensor.is_meta:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    tensor = tensor.detach()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes)
    if span != count:  # expanded, or a part of other memory
        steps = tuple(slice(None, None, max(1, size // 3)) for size in tensor.shape)
        tensor = tensor[steps].contiguous()
        count = tensor.numel()
    step = max(1, (count - 1) // (most - 1))
    return tensor.as_strided(((count - 1) // step + 1,), (step,), tensor.storage_offset()).clone()


def hash_of(sample: Tensor) -> int:
    """Hash the bits of a result of `sample_of` on a CPU."""
    return zlib.crc32(sample.view(torch.uint8).numpy().data)


def torch_generator() -> int:
    """Hash parts of the CPU generator that differ after a draw: seed, position, words, normals."""
    state = torch.default_generator.get_state().numpy().data
    return zlib.crc32(state[-64:], zlib.crc32(state[:64]))


def numpy_generator() -> int:
    """Hash the global generator of NumPy."""
    generator = get_bit_generator()  # `get_state` copies for 80 microseconds
    if type(generator).__name__ != "MT19937":
        return zlib.crc32(repr(generator.state).encode())
    # 624 words and the position.
    return zlib.crc32(ctypes.string_at(generator.ctypes.state_address, 4 * 625))


def python_generator() -> int:
    """Hash the generator of `random`."""
    _, words, normal = random.getstate()
    return hash((words, zlib.crc32(repr(normal).encode())))


# --- lines of the script ----------------------------------------------------------------------


@cache
def is_library_file(name: str) -> bool:
    """Whether a file of code belongs to Python, to an installed library or to this package."""
    if name.startswith("<frozen") or "site-packages" in name or "dist-packages" in name:
        return True
    return name.startswith((_STANDARD_LIBRARY + os.sep, _PACKAGE + os.sep))


def script_line(frame: FrameType | None) -> Line:
    """Return the innermost line that is in no installed package, or the outermost line."""
    line = ("", 0)
    while frame is not None:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if not line[0].startswith("<") and not is_library_file(line[0]):
            break
        frame = frame.f_back
    return line
