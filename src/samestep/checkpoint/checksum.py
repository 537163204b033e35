"""64-bit checksums of named tensors, and of the state of a training run.

The checksum of a state is equal for every strategy and number of ranks that gives the same state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from samestep.checkpoint.contents import Tensors, encode, encode_objects
from samestep.checkpoint.state import Training
from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import is_accelerator
from samestep.microbatches import Cursor

if TYPE_CHECKING:
    from samestep.distributed.world import World

# Words of a block: the size of a core's cache. A GPU computes several blocks at once.
_BLOCK = 2**16
_GPU_BLOCKS = 2**6
_SEED = 0x5EED
_FACTOR = (
    6364136223846793005  # odd, and 5 modulo 8: the powers have period 2^62 (Knuth's MMIX generator)
)
MODULUS = 2**64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return 64 bits that depend on every bit of `tensors`, its position, and names, types and shapes.

    A tensor is a sequence of words v_i of at most 32 bits, in the order of its elements. Its sum is
    s = sum of v_i w_i modulo 2^64, with fixed odd 64-bit weights: w_i = r_(i mod B) P^(i div B),
    with random odd r of a block of B words, and an odd P. The checksum is the sum over tensors of a
    s + b modulo 2^64, with a, odd, and b from a BLAKE2 hash of name, type and shape. Sums modulo
    2^64 have no rounding, so threads and the order of summation are irrelevant. Raw
    bits are read: NaNs with different payloads differ, and so do 0.0 and -0.0.

    A change within one word is always detected: it alters v_i by d with 0 < |d| < 2^32, and the checksum by d times an
    odd number, which is no multiple of 2^64. So every single flipped bit is detected. Changes in
    several words cancel for about one choice of the weights in 2^32 (multilinear hashing: Lemire
    and Kaser, "Strongly universal string hashing is fast", 2014; words have half the width of the
    weights so that this holds for high bits too). The weights
    are public: the checksum detects accidents, not constructed collisions.
    """
    return int(_sum_of_tensors(tensors, torch.device("cpu"))) % MODULUS


def _sum_of_tensors(tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the contribution of tensors to a checksum, without a wait for a GPU.

    Args:
        tensors: by name.
        device: device of the result.

    Returns:
        A 64-bit integer; sums of such integers wrap around.
    """
    summands = sum(_hash(name, tensor.dtype, tensor.shape)[1] for name, tensor in tensors.items())
    total = torch.full(
        (), signed(summands), dtype=torch.int64, device=device
    )  # `torch.tensor` waits for a GPU
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            by_device.setdefault(tensor.device, {})[name] = tensor
    for place, local in by_device.items():
        blocks = chain.from_iterable(_block_sums(name, tensor) for name, tensor in local.items())
        sums, factors = zip(*blocks, strict=True)
        products = torch.cat(sums) * torch.tensor([*chain.from_iterable(factors)]).to(
            place, non_blocking=True
        )
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


@lru_cache(maxsize=2**16)
def _hash(name: str, dtype: torch.dtype, shape: torch.Size) -> tuple[int, int]:
    """Return factor and summand of a tensor."""
    digest = hashlib.blake2b(f"{name} {dtype} {tuple(shape)}".encode(), digest_size=16).digest()
    return signed(int.from_bytes(digest[:8], "little") | 1), int.from_bytes(digest[8:], "little")


def _block_sums(name: str, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield sums of words times weights, and their factors in the checksum."""
    power = _hash(name, tensor.dtype, tensor.shape)[0]
    for sums in _sums_of_run(words_of(tensor)):
        powers = []
        for _ in range(len(sums)):
            powers.append(signed(power))
            power = power * _FACTOR % MODULUS
        yield sums, powers


def _sums_of_run(words: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield sums of words times weights, one per block."""
    weights = _weights(words.device)
    whole = len(words) // _BLOCK * _BLOCK
    if whole:
        rows = words[:whole].view(-1, _BLOCK)
        at_once = _GPU_BLOCKS if is_accelerator(words.device) else 1
        for some in rows.split(at_once):
            yield _products(some, weights)
    if whole < len(words):
        yield _products(words[whole:], weights[: len(words) - whole])


def _products(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of words times weights of each row."""
    return words.to(torch.int64).mul_(weights).sum(-1).reshape(-1)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        _SEED
    )  # not the default one: its state must not change
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
class _State:
    """State of which a checksum is computed.

    Attributes:
        tensors: tensors by name.
        values: other values as text, by name.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


def state_checksum(trained: Trained, cursor: Cursor) -> int | None:
    """Return 64 bits that depend on every bit of the state of `trained`; None on ranks other than 0.

    The state consists of parameters, persistent buffers, state and groups of the optimizer, moving
    average, state of scaler, schedule and modules, number of steps, and the position `cursor`.
    Tensors enter as in `checksum`, other values by their BLAKE2 hash.

    The parameters must be complete on each rank. Waits for a GPU once.

    Raises:
        InputError: the state has a value that a checkpoint cannot hold.
    """
    if not trained.world.is_main:
        return None
    state = _state_of(trained, cursor)
    total = _sum_of_tensors(state.tensors, trained.world.device) + _sum_of_values(state.values)
    return int(device_reads.values(total)) % MODULUS


def checksum_event(trained: Trained, cursor: Cursor) -> dict[str, Any]:
    """Return the fields of an event with the checksum of the state, in hexadecimal digits.

    There are none on ranks other than 0, which log nothing.
    """
    value = state_checksum(trained, cursor)
    if value is not None:
        return {"step": trained.steps, "checksum": f"{value:016x}"}
    return {}


def checksums_by_name(trained: Trained, cursor: Cursor) -> dict[str, str]:
    """Return the share of each tensor and value of the checksum, in hexadecimal digits; empty on ranks other than 0."""
    if not trained.world.is_main:
        return {}
    state = _state_of(trained, cursor)
    host = torch.device("cpu")
    sums = {
        name: int(_sum_of_tensors({name: tensor}, host)) for name, tensor in state.tensors.items()
    }
    sums |= {name: _sum_of_values({name: value}) for name, value in state.values.items()}
    return {name: f"{value % MODULUS:016x}" for name, value in sums.items()}


def _state_of(trained: Trained, cursor: Cursor) -> _State:
    training = trained.training
    assert not training.parameters.is_divided
    result = _other_state(training, trained.steps, cursor)
    for name, kind, value in _values_of_parameters(training):
        if isinstance(value, torch.Tensor):
            result.tensors[f"{kind} of {name}"] = value
        else:
            result.values[f"{kind} of {name}"] = json.dumps(encode(value, {}, kind))
    return result


def _values_of_parameters(training: Training) -> Iterator[tuple[str, str, Any]]:
    """Yield name, kind and value of the parameters, their state in the optimizer, and their average."""
    state = training.optimizer.state
    for name, parameter in training.parameters.local.items():
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


def _other_state(training: Training, step: int, cursor: Cursor) -> _State:
    """Return the state besides parameters."""
    result = _State()
    model = training.model
    encoded = Tensors()
    result.tensors |= {f"buffer {name}": buffer for name, buffer in _buffers_of(model).items()}
    optimizer = training.optimizer
    groups = [
        {key: _as_loaded(v) for key, v in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    shared = {
        str(key): value
        for key, value in optimizer.state.items()
        if not isinstance(key, torch.Tensor)
    }
    values = {
        "steps": step,
        "position": astuple(cursor),
        "optimizer groups": encode(groups, encoded, "optimizer groups"),
        "optimizer state without a parameter": encode(shared, encoded, "optimizer state"),
        **encode_objects(model, training.scheduler, {}, encoded),
    }
    result.values |= {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    result.tensors |= dict(encoded.values())
    scaler = training.scaler
    if (
        scaler.is_enabled()
    ):  # not `state_dict`, which waits for the device; the tensors are created in the first step
        scale = torch.tensor(scaler._init_scale) if scaler._scale is None else scaler._scale
        tracker = scaler._growth_tracker
        tracker = torch.tensor(scaler._init_growth_tracker) if tracker is None else tracker
        result.tensors |= {"scale": scale.float(), "growth tracker": tracker.int()}
    return result


def _as_loaded(value: Any) -> Any:
    """Return an option of the optimizer as a checkpoint restores it."""
    if isinstance(value, tuple):
        return list(value)
    return value


def _sum_of_values(values: dict[str, str]) -> int:
    """Return the contribution of values to a checksum, as a signed integer."""
    texts = (f"{name} {value}".encode() for name, value in values.items())
    total = sum(
        int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") for text in texts
    )
    return (total + 2**63) % MODULUS - 2**63
