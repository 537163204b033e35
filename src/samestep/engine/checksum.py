"""A checksum of tensors' bits, computed where the tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch

# Words that are multiplied at once: what fits into a core's cache, or what a GPU is worth starting for.
_CPU_WORDS, _GPU_WORDS = 2**16, 2**22
_SEED = 0x5EED
_FACTOR = 6364136223846793005  # odd, and 5 modulo 8: its powers repeat only after 2^62 (Knuth's MMIX generator)
_MODULUS = 2**64

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """64 bits that depend on every bit of `tensors` and on its place; the same on every machine.

    The tensors of a device are read as one sequence of words v_i of at most 32 bits. In a piece of fixed length the
    checksum is the sum of v_i w_i modulo 2^64, with fixed random odd 64-bit weights w_i; the piece sums s_j join as
    h = h P + s_j with an odd P. Sums modulo 2^64 have no rounding, so neither threads nor the order of summation
    matter, and raw bits are read: NaNs of different payload differ, and so do 0.0 and -0.0.

    What is certain: a change within one word is seen. It alters v_i by d with 0 < |d| < 2^32, hence the checksum by d
    times an odd number, which is no multiple of 2^64. So every single flipped bit is seen. Changes in several words
    cancel for about one choice of the weights in 2^32 (multilinear hashing: Lemire and Kaser, "Strongly universal
    string hashing is fast", 2014; the words have half the width of the weights so that this holds for top bits too).
    The weights are public: this finds accidents, not somebody who looks for a collision. Shapes and types are not
    part of it.
    """
    words: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        words.setdefault(tensor.device, []).append(_words(tensor))
    total = 0
    for parts in words.values():
        total = (total * _FACTOR + int(_sum(parts))) % _MODULUS
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as a flat tensor of integers of at most 32 bits."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    # A view of a part of a bigger tensor may begin where a wider integer cannot; of a narrower one it always can.
    return tensor.resolve_neg().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    device = parts[0].device
    weights = _weights(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for piece in _pieces(parts, len(weights)):
        total = total * _FACTOR + (piece * weights[: len(piece)]).sum()
    return total


def _pieces(parts: list[torch.Tensor], length: int) -> Iterator[torch.Tensor]:
    """All words in order in pieces of at most `length`: small tensors joined, large ones cut; as shapes have it."""
    small: list[torch.Tensor] = []
    filled = 0
    for part in (piece for whole in parts for piece in whole.split(length)):
        if filled + len(part) > length:
            yield torch.cat([each.to(torch.int32) for each in small])
            small, filled = [], 0
        small.append(part)
        filled += len(part)
    yield torch.cat([each.to(torch.int32) for each in small])


@cache
def _weights(device: torch.device) -> torch.Tensor:
    count = _GPU_WORDS if device.type == "cuda" else _CPU_WORDS
    generator = torch.Generator().manual_seed(_SEED)  # of its own: nothing else that is drawn may change
    weights = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) | 1
    return weights.to(device)
