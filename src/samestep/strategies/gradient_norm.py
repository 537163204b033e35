"""Sum of the squares of all gradients, with the same bits for every division of the rows of parameters among ranks.

A row is an index of the first dimension, along which FSDP divides. The squares of a row are added in one order, which
depends on its length alone; on an accelerator, those of each block of the row, so that few kernels suffice. The sums
are added without rounding, so their order is free: each is rounded to two fixed grids on which all sums are exact
(Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from samestep.distributed.devices import is_accelerator

_LANES = 32  # elements of a row that are not added before the exact sum; a power of two
_BLOCKS = 256, 64  # lengths of the blocks of a long row on an accelerator; other rows are one block
_CHUNK = 2**24  # elements that are squared at a time on an accelerator, which bounds the memory
_MANTISSA = 53  # bits of a float64


def partial_squares(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return non-negative float64 values on `device` whose sum is that of the squares of `gradients`.

    If gradients are divided by rows, all parts together have the values of the full gradients. No wait for a device.
    """
    roots: list[torch.Tensor] = []  # elements of short rows, and norms of rows
    matrices: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel() == 0:
            continue
        width = gradient.numel() // (gradient.shape[0] if gradient.dim() else 1)
        if width <= _LANES:
            roots.append(gradient.reshape(-1))
        elif not is_accelerator(gradient.device):
            roots.append(row_norms(gradient.reshape(-1, width).contiguous()))
        else:
            length = next((block for block in _BLOCKS if width % block == 0), width)
            key = (gradient.device, gradient.dtype, length)
            matrices.setdefault(key, []).append(gradient.reshape(-1, length))
    if any(root.device != device for root in roots):
        roots = [root.to(device, non_blocking=True) for root in roots]
    values = [torch.cat(roots).double().square_()] if roots else [torch.zeros(1, dtype=torch.float64, device=device)]
    for (*_, length), of_length in matrices.items():
        for chunk in _chunks(of_length, max(1, _CHUNK // length)):
            values.append(folded_squares(chunk).to(device, non_blocking=True))
    return torch.cat(values) if len(values) > 1 else values[0]


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row of a contiguous matrix on a CPU, in the order of torch's kernel.

    The kernel computes each row alone, with unaligned loads, here in float32 or float64.
    """
    rows = matrix if matrix.dtype.itemsize >= torch.float32.itemsize else matrix.float()
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def folded_squares(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Return up to `_LANES` partial sums of squares per row of matrices of equal width, flat, halves added to halves.

    Only elementwise additions: the order of an accelerator's reduction depends on the shape and the address.
    """
    rows = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    squares = rows.to(torch.float64, copy=True).square_()
    width = squares.shape[1]
    while width > _LANES:
        half = 1 << (width - 1).bit_length() - 1
        squares[:, : width - half].add_(squares[:, half:width])
        width = half
    return squares[:, :width].flatten()


def sums_on_grids(values: torch.Tensor, largest: torch.Tensor, count: int) -> torch.Tensor:
    """Return the exact sums of non-negative float64 values rounded to a coarse grid, and of the remainders.

    Results for disjoint sets of values add up without rounding, in any order. Not finite if a value is not.

    Args:
        values: of shape `(N,)`.
        largest: scalar, the largest value of all sets.
        count: not below the number of values of all sets.

    Returns:
        Two float64 sums. Their total is that of the values, each rounded to `2**-100 * count**2` of the largest.
    """
    bits = count.bit_length()
    # Adding and subtracting a number rounds to multiples of its last place u. Coarse values and their sums, below the
    # number, are less than 2**53 u, so they are exact. A remainder is at most u.
    number = largest * 2.0 ** (bits + 1)
    coarse = (values + number).sub_(number)
    rest = values - coarse
    # At least `2 * count * u`. A negative remainder may round to multiples of half of the last place: exact as well.
    number = number * 2.0 ** (bits + 2 - _MANTISSA)
    return torch.stack([coarse.sum(), rest.add_(number).sub_(number).sum()])


def _chunks(matrices: Sequence[torch.Tensor], rows: int) -> Iterator[list[torch.Tensor]]:
    """Iterate over lists of blocks of `matrices` with at most `rows` rows in total."""
    chunk: list[torch.Tensor] = []
    size = 0
    for matrix in matrices:
        for block in matrix.split(rows):
            if size + len(block) > rows:
                yield chunk
                chunk, size = [], 0
            chunk.append(block)
            size += len(block)
    yield chunk
