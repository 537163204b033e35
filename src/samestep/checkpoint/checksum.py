"""64-bit checksums of named tensors, of which ranks can hash parts separately, and of the state of a training run.

The checksum of a state is equal for every strategy and number of ranks that gives the same state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from samestep.checkpoint.compatibility import Tensors, encode, encode_objects
from samestep.checkpoint.state import Training
from samestep.distributed.devices import is_accelerator
from samestep.microbatches import Cursor

if TYPE_CHECKING:
    from samestep.distributed.world import World

# Words of a block: the size of a core's cache. A GPU computes several blocks at once.
_BLOCK, _GPU_BLOCKS = 2**16, 2**6
_SEED = 0x5EED
_FACTOR = 6364136223846793005  # odd, and 5 modulo 8: the powers have period 2^62 (Knuth's MMIX generator)
MODULUS = 2**64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class Part(NamedTuple):
    """Rectangular part of a named tensor."""

    tensor: torch.Tensor
    shape: torch.Size  # of the full tensor
    offsets: tuple[int, ...]  # of the first element of the part in each dimension of the full tensor

    @property
    def is_first(self) -> bool:
        """Whether this part has the first element, or the tensor has none."""
        return not any(self.offsets) and (self.tensor.numel() > 0 or self.shape.numel() == 0)

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Part:
        """Return a full tensor as a part."""
        return cls(tensor, tensor.shape, (0,) * tensor.dim())


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return 64 bits that depend on every bit of `tensors`, its position, and names, types and shapes.

    A tensor is a sequence of words v_i of at most 32 bits, in the order of its elements. Its sum is s = sum of v_i w_i
    modulo 2^64, with fixed odd 64-bit weights: w_i = r_(i mod B) P^(i div B), with random odd r of a block of B words,
    and an odd P. The checksum is the sum over tensors of a s + b modulo 2^64, with a, odd, and b from a BLAKE2 hash of
    name, type and shape. Sums modulo 2^64 have no rounding, so threads, the order of summation and the division of a
    tensor into parts are irrelevant. Raw bits are read: NaNs with different payloads differ, and so do 0.0 and -0.0.

    A change within one word is always detected: it alters v_i by d with 0 < |d| < 2^32, and the checksum by d times an
    odd number, which is no multiple of 2^64. So every single flipped bit is detected. Changes in several words cancel
    for about one choice of the weights in 2^32 (multilinear hashing: Lemire and Kaser, "Strongly universal string
    hashing is fast", 2014; words have half the width of the weights so that this holds for high bits too). The weights
    are public: the checksum detects accidents, not constructed collisions.
    """
    parts = {name: Part.whole(tensor) for name, tensor in tensors.items()}
    return int(sum_of_parts(parts, torch.device("cpu"))) % MODULUS


def sum_of_parts(parts: Mapping[str, Part], device: torch.device) -> torch.Tensor:
    """Return the contribution of parts of tensors to a checksum, without a wait for a GPU.

    Args:
        parts: by the names of the tensors. Parts of one tensor are on several ranks, each element on one of them; the
            sum over ranks is the checksum, if one rank has the first element of each tensor.
        device: device of the result.

    Returns:
        A 64-bit integer; sums of such integers wrap around.
    """
    summands = sum(_key(name, part)[1] for name, part in parts.items() if part.is_first)
    total = torch.full((), signed(summands), dtype=torch.int64, device=device)  # `torch.tensor` waits for a GPU
    by_device: dict[torch.device, dict[str, Part]] = {}
    for name, part in parts.items():
        if part.tensor.numel():
            by_device.setdefault(part.tensor.device, {})[name] = part
    for place, local in by_device.items():
        sums, factors = zip(*chain.from_iterable(_block_sums(name, part) for name, part in local.items()), strict=True)
        products = torch.cat(sums) * torch.tensor([*chain.from_iterable(factors)]).to(place, non_blocking=True)
        total += products.sum().to(device, non_blocking=is_accelerator(device))
    return total


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as a flat tensor of integers of at most 32 bits."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    # Integers no wider than the elements, because a view of a larger tensor may have any alignment.
    return tensor.resolve_neg().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def mix(history: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return h P + bits modulo 2^64 for 64-bit integers: a difference between two histories never disappears."""
    return history * _FACTOR + bits


def signed(number: int) -> int:
    """Return a number modulo 2^64 as the signed integer of an int64 tensor."""
    return (number + 2**63) % MODULUS - 2**63


def _key(name: str, part: Part) -> tuple[int, int]:
    return _hash(name, part.tensor.dtype, part.shape)


@lru_cache(maxsize=2**16)
def _hash(name: str, dtype: torch.dtype, shape: torch.Size) -> tuple[int, int]:
    """Return factor and summand of a tensor."""
    digest = hashlib.blake2b(f"{name} {dtype} {tuple(shape)}".encode(), digest_size=16).digest()
    return signed(int.from_bytes(digest[:8], "little") | 1), int.from_bytes(digest[8:], "little")


def _block_sums(name: str, part: Part) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield sums of words times weights, and their factors in the checksum."""
    words, factor = words_of(part.tensor), _key(name, part)[0]
    if part.tensor.shape[1:] != part.shape[1:]:
        for total in _sums_of_rows(part, words):
            yield total, [factor]
        return
    per_element = len(words) // part.tensor.numel()
    first = per_element * part.offsets[0] * part.shape[1:].numel() if part.offsets else 0
    power = factor * pow(_FACTOR, first // _BLOCK, MODULUS)
    for sums in _sums_of_run(words, first % _BLOCK):
        powers = []
        for _ in range(len(sums)):
            powers.append(signed(power))
            power = power * _FACTOR % MODULUS
        yield sums, powers


def _sums_of_rows(part: Part, words: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield sums of words times weights and powers for a part that is divided along its second or a later dimension."""
    device, shape = words.device, part.tensor.shape
    positions = torch.full((), part.offsets[-1], device=device)  # of the first element of each row
    for dimension, offset in enumerate(part.offsets[:-1]):
        indices = offset + torch.arange(shape[dimension], device=device)
        positions = positions.unsqueeze(-1) + indices * part.shape[dimension + 1 :].numel()
    rows = words.view(positions.numel(), -1)
    per_element, length = len(words) // part.tensor.numel(), rows.shape[1]
    powers = _powers(0, -(-part.shape.numel() * per_element // _BLOCK)).to(device, non_blocking=True)
    at_once = max(1, (_GPU_BLOCKS if is_accelerator(device) else 1) * _BLOCK // length)
    for some, starts in zip(rows.split(at_once), positions.flatten().split(at_once), strict=True):
        indices = starts.unsqueeze(-1) * per_element + torch.arange(length, device=device)
        weights = _weights(device)[indices % _BLOCK] * powers[indices // _BLOCK]
        yield _products(some.reshape(-1), weights.flatten())


def _sums_of_run(words: torch.Tensor, begin: int) -> Iterator[torch.Tensor]:
    """Yield sums of consecutive words times weights, one per block; the first word is at `begin` of its block."""
    weights = _weights(words.device)
    if begin or len(words) < _BLOCK:
        yield _products(words[: _BLOCK - begin], weights[begin : begin + len(words)])
        words = words[_BLOCK - begin :]
    whole = len(words) // _BLOCK * _BLOCK
    if whole:
        rows = words[:whole].view(-1, _BLOCK)
        for some in rows.split(_GPU_BLOCKS if is_accelerator(words.device) else 1):
            yield _products(some, weights)
    if whole < len(words):
        yield _products(words[whole:], weights[: len(words) - whole])


def _products(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of words times weights of each row."""
    return words.to(torch.int64).mul_(weights).sum(-1).reshape(-1)


def _powers(begin: int, end: int) -> torch.Tensor:
    """Return the powers of the factor with exponents from `begin` to `end`."""
    powers = torch.full((end - begin,), _FACTOR)
    powers[:1] = signed(pow(_FACTOR, begin, MODULUS))
    return powers.cumprod(0)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)  # not the default one: its state must not change
    weights = torch.randint(-(2**63), 2**63 - 1, (_BLOCK,), generator=generator) | 1
    return weights.to(device)


class Trained(Protocol):
    """A loop that trains a model."""

    steps: int
    world: World

    @property
    def training(self) -> Training:
        """The objects with state."""


@dataclass
class StateParts:
    """Parts of a state from which its checksum is computed.

    Attributes:
        tensors: tensors by name.
        values: other values as text, by name.
    """

    tensors: dict[str, Part] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


def state_checksum(trained: Trained, cursor: Cursor) -> int | None:
    """Return 64 bits that depend on every bit of the state of `trained`; None on ranks other than 0.

    The state consists of parameters, persistent buffers, state and groups of the optimizer, moving average, state
    of scaler, schedule and modules, number of steps, and the position `cursor`. Tensors enter as in `checksum`, other
    values by their BLAKE2 hash.

    The parameters must be complete on each rank. Waits for a GPU once.

    Raises:
        InputError: the state has a value that a checkpoint cannot hold.
    """
    if not trained.world.is_main:
        return None
    parts = state_parts(trained, cursor)
    total = sum_of_parts(parts.tensors, trained.world.device) + sum_of_values(parts.values)
    return int(total) % MODULUS


def checksum_event(trained: Trained, cursor: Cursor) -> dict[str, Any]:
    """Return the fields of an event with the checksum of the state, in hexadecimal digits.

    There are none on ranks other than 0, which log nothing.
    """
    value = state_checksum(trained, cursor)
    return {"step": trained.steps, "checksum": f"{value:016x}"} if value is not None else {}


def checksums_by_name(trained: Trained, cursor: Cursor) -> dict[str, str]:
    """Return the share of each tensor and value of the checksum, in hexadecimal digits; empty on ranks other than 0."""
    if not trained.world.is_main:
        return {}
    parts = state_parts(trained, cursor)
    sums = {name: int(sum_of_parts({name: part}, torch.device("cpu"))) for name, part in parts.tensors.items()}
    sums |= {name: sum_of_values({name: value}) for name, value in parts.values.items()}
    return {name: f"{value % MODULUS:016x}" for name, value in sums.items()}


def state_parts(trained: Trained, cursor: Cursor) -> StateParts:
    """Return the parts of the state, with complete tensors."""
    training = trained.training
    assert not training.parameters.is_divided
    result = _other_parts(training, trained.steps, cursor)
    for name, kind, value in _values_of_parameters(training):
        if isinstance(value, torch.Tensor):
            result.tensors[f"{kind} of {name}"] = Part.whole(value)
        else:
            result.values[f"{kind} of {name}"] = json.dumps(encode(value, {}, kind))
    return result


def _values_of_parameters(training: Training) -> Iterator[tuple[str, str, Any]]:
    """Yield name, kind and value of the parameters, their state in the optimizer, and their average."""
    local, state = training.parameters.local, training.optimizer.state
    for name, parameter in local.items():
        yield name, "value", parameter.detach()
        for key, value in state.get(parameter, {}).items():
            yield name, f"optimizer {key}", value
    for name, value in (training.average or {}).items():
        yield name, "average", value


def _buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model that a checkpoint contains, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _other_parts(training: Training, step: int, cursor: Cursor) -> StateParts:
    """Return the state besides parameters."""
    result, model, encoded = StateParts(), training.model, Tensors()
    result.tensors |= {f"buffer {name}": Part.whole(buffer) for name, buffer in _buffers_of(model).items()}
    optimizer = training.optimizer
    groups = [{key: _as_loaded(v) for key, v in group.items() if key != "params"} for group in optimizer.param_groups]
    shared = {str(key): value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    values = {
        "steps": step,
        "position": astuple(cursor),
        "optimizer groups": encode(groups, encoded, "optimizer groups"),
        "optimizer state without a parameter": encode(shared, encoded, "optimizer state"),
        **encode_objects(model, training.scheduler, {}, encoded),
    }
    result.values |= {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    result.tensors |= {name: Part.whole(tensor) for name, tensor in encoded.values()}
    scaler = training.scaler
    if scaler.is_enabled():  # not `state_dict`, which waits for the device; the tensors are created in the first step
        scale = torch.tensor(scaler._init_scale) if scaler._scale is None else scaler._scale
        tracker = scaler._growth_tracker
        tracker = torch.tensor(scaler._init_growth_tracker) if tracker is None else tracker
        result.tensors |= {"scale": Part.whole(scale.float()), "growth tracker": Part.whole(tracker.int())}
    return result


def _as_loaded(value: Any) -> Any:
    """Return an option of the optimizer as a checkpoint restores it."""
    return list(value) if isinstance(value, tuple) else value


def sum_of_values(values: dict[str, str]) -> int:
    """Return the contribution of values to a checksum, as a signed integer."""
    texts = (f"{name} {value}".encode() for name, value in values.items())
    total = sum(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") for text in texts)
    return (total + 2**63) % MODULUS - 2**63
