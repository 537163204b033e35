"""Copies of tensors in host memory, and files of these copies in the format of safetensors.

Decisions: docs/decisions/runs.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from safetensors.torch import save

from samestep.distributed.devices import accelerator_module, is_accelerator

_PIECE_BYTES = 1 << 20
_HEADER_ALIGNMENT = 8


class HostBuffers:
    """Host memory for copies of tensors, reused by the copies of the next save.

    The memory is page-locked for tensors on an accelerator. Their copies are queued in the current stream of their
    device: the host does not wait, and later work of the stream, such as the next update, follows the copies.
    """

    def __init__(self) -> None:
        self._free: dict[object, list[torch.Tensor]] = {}
        self._used: dict[object, list[torch.Tensor]] = {}
        self._events: dict[torch.device, Any] = {}  # the last copy of each accelerator

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy in host memory, complete after `wait`."""
        device, is_queued = tensor.device, is_accelerator(tensor.device)
        key = tensor.shape, tensor.dtype, is_queued
        free = self._free.get(key)
        buffer = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_queued)
        self._used.setdefault(key, []).append(buffer)
        buffer.copy_(tensor.detach(), non_blocking=is_queued)
        if is_queued:
            self._events[device] = accelerator_module().current_stream(device).record_event()
        return buffer

    def wait(self) -> None:
        """Wait for the copies. Any thread may call this."""
        for event in self._events.values():
            event.synchronize()

    def reuse(self) -> None:
        """Make the memory of the present copies available to the next ones; call when nothing reads them any more."""
        self._free, self._used = self._used, {}


def distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors without aliases, and the name of the original for each alias."""
    first: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        # Empty tensors share an address.
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases


class TensorFile:
    """File in the format of safetensors, with the bytes of `safetensors.torch.save`, as an iterable of its pieces.

    Large tensors are not copied; small ones are joined, so that a file has few pieces.

    Args:
        tensors: contiguous tensors in host memory by name, complete before the first iteration.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def __iter__(self) -> Iterator[bytes | memoryview]:
        names, header = self._layout
        joined = bytearray(header)
        for name in names:
            data = self._tensors[name].reshape(-1).view(torch.uint8).numpy().data
            if len(joined) + len(data) > _PIECE_BYTES:
                yield bytes(joined)
                joined = bytearray()
            if len(data) > _PIECE_BYTES:
                yield data
            else:
                joined += data
        yield bytes(joined)

    @cached_property
    def _layout(self) -> tuple[list[str], bytes]:
        """Names in the order of their data, and header."""
        # The library decides order and types; without elements it has nothing to copy.
        empty = {name: torch.empty((0, *tensor.shape), dtype=tensor.dtype) for name, tensor in self._tensors.items()}
        template = save(empty)
        size = int.from_bytes(template[:_HEADER_ALIGNMENT], "little")
        entries = json.loads(template[_HEADER_ALIGNMENT:][:size])
        end = 0
        for name, entry in entries.items():
            begin, end = end, end + self._tensors[name].nbytes
            entry |= {"shape": entry["shape"][1:], "data_offsets": [begin, end]}
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT)
        return list(entries), len(text).to_bytes(_HEADER_ALIGNMENT, "little") + text
