"""The checksum depends on every bit and its position, and on nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.engine import consistency as module
from samestep.engine.consistency import checksum

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def of_bytes(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Return a tensor of random bits; floating-point types may contain NaNs."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(dtype)


def with_flipped_bit(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    flipped = tensor.clone()
    if tensor.dtype == torch.bool:
        flipped[bit % len(tensor)] ^= True
    else:
        data = flipped.view(torch.uint8)
        data[bit // 8 % len(data)] ^= 1 << bit % 8
    return flipped


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**32), bit=st.integers(0, 10**6))
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype, count: int, seed: int, bit: int) -> None:
    tensor = of_bytes(dtype, count, seed)
    assert checksum([tensor]) == checksum([tensor.clone()])
    assert checksum([tensor]) != checksum([with_flipped_bit(tensor, bit)])


@given(flips=st.lists(st.integers(0, 64 * 50 - 1), min_size=1, max_size=8, unique=True))
def test_several_flipped_bits_change_the_checksum(flips: list[int]) -> None:
    tensor = torch.zeros(50, dtype=torch.float64)
    flipped = tensor
    for bit in flips:
        flipped = with_flipped_bit(flipped, bit)
    assert checksum([tensor]) != checksum([flipped])


@given(positions=st.sets(st.integers(0, 49), min_size=1))
def test_any_number_of_changed_signs_changes_the_checksum(positions: set[int]) -> None:
    """If words were as wide as weights, sums modulo a power of two could miss changes of the top bits of words."""
    tensor = torch.randn(50, dtype=torch.float64)
    negated = tensor.clone()
    negated[list(positions)] *= -1
    assert checksum([tensor]) != checksum([negated])


@given(first=st.integers(0, 99), second=st.integers(0, 99))
def test_swapped_elements_change_the_checksum(first: int, second: int) -> None:
    tensor = torch.arange(100, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert (checksum([tensor]) == checksum([swapped])) == (first == second)


def test_order_of_tensors_changes_the_checksum() -> None:
    one, two = torch.ones(3), torch.zeros(3)
    assert checksum([one, two]) != checksum([two, one])


def test_values_that_compare_equal_have_different_checksums() -> None:
    assert checksum([torch.tensor(0.0)]) != checksum([torch.tensor(-0.0)])
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert all(math.isnan(value) for value in nans.tolist())
    assert checksum([nans[:1]]) != checksum([nans[1:]])


def test_checksum_depends_on_elements_and_not_on_strides() -> None:
    tensor = torch.randn(6, 8)
    assert checksum([tensor.t()]) == checksum([tensor.t().contiguous()])
    assert checksum([tensor[:, ::2]]) == checksum([tensor[:, ::2].clone()])
    assert checksum([torch.randn(7).requires_grad_()]) > 0
    odd = torch.arange(9, dtype=torch.int16)[1:]  # starts at an address that is not aligned for wider integers
    assert checksum([odd]) == checksum([odd.clone()])
    assert checksum([torch.tensor(3.0).expand(4)]) == checksum([torch.full((4,), 3.0)])


def test_empty_tensors_have_checksum_zero() -> None:
    assert checksum([]) == checksum([torch.empty(0)]) == 0
    assert checksum([torch.empty(0, 3), torch.ones(2)]) == checksum([torch.ones(2)])


def test_checksum_is_equal_for_all_thread_counts_and_leaves_the_generator_unchanged() -> None:
    tensor = torch.randn(3, 2**16 + 5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    module._weights.cache_clear()
    checksums = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            checksums.add(checksum([tensor]))
    finally:
        torch.set_num_threads(threads)
    assert len(checksums) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bit", [0, 31, 32 * (2**16 - 1), 32 * 2**16, 32 * (2**17 + 4) + 31])
def test_bits_beyond_the_first_block_change_the_checksum(bit: int) -> None:
    tensor = torch.zeros(2**17 + 5)
    assert checksum([tensor]) != checksum([with_flipped_bit(tensor, bit)])
    assert checksum([torch.ones(3), tensor]) != checksum([torch.ones(3), with_flipped_bit(tensor, bit)])


def test_checksum_is_the_documented_weighted_sum() -> None:
    values = [5, -7, 2**31 - 1]
    weights = module._weights(torch.device("cpu")).tolist()
    expected = sum(value * weight for value, weight in zip(values, weights[:3], strict=True)) % 2**64
    assert all(weight % 2 for weight in weights)
    assert checksum([torch.tensor(values, dtype=torch.int32)]) == expected
