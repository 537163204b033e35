"""64-bit checksums of named tensors, and of the state of a training run.

The checksum of a state is equal for every strategy and number of ranks that gives the same state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from samestep.checkpoint.contents import Training
from samestep.checkpoint.encoding import Tensors, encode, encode_objects
from samestep.cursor import Cursor
from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import is_accelerator

if TYPE_CHECKING:
    from samestep.distributed.world import World

# Words of a block: the size of a core's cache. A GPU computes several blocks at once.
_BLOCK = 2**16
_GPU_BLOCKS = 2**6
_SEED = 0x5EED
# Odd, and 5 modulo 8: the powers have period 2^62 (Knuth's MMIX generator).
_FACTOR = 6364136223846793005
MODULUS = 2**64
# 8 bytes are two words: a word has half the width of a weight.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return 64 bits that depend on every bit of `tensors`, and on names, types and shapes.

    A tensor is a sequence of words v_i of at most 32 bits, in the order of its elements. Its sum is
    s = sum of v_i w_i modulo 2^64, with fixed odd 64-bit weights: w_i = r_(i mod B) P^(i div B),
    with random odd r of a block of B words, and an odd P. The checksum is the sum over tensors of a
    s + b modulo 2^64, with a, odd, and b from a BLAKE2 hash of name, type and shape. Sums modulo
    2^64 have no rounding, so threads and the order of summation are irrelevant. Raw bits are read:
    NaNs with different payloads differ, and so do 0.0 and -0.0.

    A change within one word is always detected: it alters v_i by d with 0 < |d| < 2^32, and the
    checksum by d times an odd number, which is no multiple of 2^64. So every single flipped bit is
    detected. Changes in several words cancel for about one choice of the weights in 2^32
    (multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014; words
    have half the width of the weights so that this holds for high bits too). The weights are
    public: the checksum detects accidents, not constructed collisions.
    """
    return int(_sum_of_tensors(tensors, torch.device("cpu"))) % MODULUS


def _sum_of_tensors(tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the contribution of tensors to a checksum as a 64-bit integer on `device`.

    Sums of such integers wrap around. This does not wait for a GPU.
    """
    summands = sum(_hash(name, tensor.dtype, tensor.shape)[1] for name, tensor in tensors.items())
    # `torch.tensor` would wait for a GPU.
    total = torch.full((), signed(summands), dtype=torch.int64, device=device)
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            by_device.setdefault(tensor.device, {})[name] = tensor
    for place, local in by_device.items():
        blocks = chain.from_iterable(_block_sums(name, tensor) for name, tensor in local.items())
        sums, factors = zip(*blocks, strict=True)
        weights = torch.tensor([*chain.from_iterable(factors)]).to(place, non_blocking=True)
        products = torch.cat(sums) * weights
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
    words = words_of(tensor)
    weights = _weights(words.device)
    whole = len(words) // _BLOCK * _BLOCK
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    if whole:
        at_once = _GPU_BLOCKS if is_accelerator(words.device) else 1
        rows = words[:whole].view(-1, _BLOCK)
        parts = [(some, weights) for some in rows.split(at_once)]
    if whole < len(words):
        parts.append((words[whole:], weights[: len(words) - whole]))
    for some, factors in parts:
        sums = some.to(torch.int64).mul_(factors).sum(-1).reshape(-1)
        powers = []
        for _ in range(len(sums)):
            powers.append(signed(power))
            power = power * _FACTOR % MODULUS
        yield sums, powers


@cache
def _weights(device: torch.device) -> torch.Tensor:
    # Not the default generator, whose state must not change.
    generator = torch.Generator().manual_seed(_SEED)
    weights = torch.randint(-(2**63), 2**63 - 1, (_BLOCK,), generator=generator) | 1
    return weights.to(device)


class Trained(Protocol):
    """A loop that trains a model."""

    steps: int
    world: World

    @property
    def training(self) -> Training:
        """The objects with state."""


def checksum_event(trained: Trained, cursor: Cursor) -> dict[str, Any]:
    """Return the fields of an event with the checksum of the state, in hexadecimal digits.

    The checksum has 64 bits that depend on every bit of the state: parameters, persistent buffers,
    state and groups of the optimizer, moving average, state of scaler, schedule and modules, number
    of steps, and the position `cursor`. Tensors enter as in `checksum`, other values by a hash.

    The parameters must be complete on each rank. Waits for a GPU once. There are no fields on ranks
    other than 0, which log nothing.

    Raises:
        InputError: the state has a value that a checkpoint cannot hold.
    """
    if not trained.world.is_main:
        return {}
    tensors, texts = _state_of(trained, cursor)
    total = _sum_of_tensors(tensors, trained.world.device) + _sum_of_texts(texts)
    value = int(device_reads.values(total)) % MODULUS
    return {"step": trained.steps, "checksum": f"{value:016x}"}


def _state_of(trained: Trained, cursor: Cursor) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the state: tensors, and other values as text, by name."""
    training = trained.training
    assert not training.parameters.is_divided
    optimizer = training.optimizer
    tensors = {f"buffer {name}": buffer for name, buffer in buffers_of(training.model).items()}
    groups = [
        # Tuples become lists when a checkpoint restores them.
        {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    shared = {
        str(key): value
        for key, value in optimizer.state.items()
        if not isinstance(key, torch.Tensor)
    }
    encoded = Tensors()
    values = {
        "steps": trained.steps,
        "position": astuple(cursor),
        "optimizer groups": encode(groups, encoded, "optimizer groups"),
        "optimizer state without a parameter": encode(shared, encoded, "optimizer state"),
        **encode_objects(training.model, training.scheduler, {}, encoded),
    }
    texts = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    tensors |= dict(encoded.values())
    scaler = training.scaler
    if scaler.is_enabled():
        # Not `state_dict`, which waits for the device. The first step creates the tensors.
        scale = scaler._scale
        tracker = scaler._growth_tracker
        if scale is None or tracker is None:
            scale = torch.tensor(scaler._init_scale)
            tracker = torch.tensor(scaler._init_growth_tracker)
        tensors |= {"scale": scale.float(), "growth tracker": tracker.int()}
    for name, parameter in training.parameters.local.items():
        tensors[f"value of {name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            kind = f"optimizer {key}"
            if isinstance(value, torch.Tensor):
                tensors[f"{kind} of {name}"] = value
            else:
                texts[f"{kind} of {name}"] = json.dumps(encode(value, {}, kind))
    average = training.average or {}
    tensors |= {f"average of {name}": value for name, value in average.items()}
    return tensors, texts


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model that a checkpoint contains, by name."""
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _sum_of_texts(texts: dict[str, str]) -> int:
    """Return the contribution of values to a checksum, as a signed integer."""
    total = 0
    for name, text in texts.items():
        digest = hashlib.blake2b(f"{name} {text}".encode(), digest_size=8).digest()
        # A sum does not depend on the order of the names.
        total += int.from_bytes(digest, "little")
    return signed(total)
