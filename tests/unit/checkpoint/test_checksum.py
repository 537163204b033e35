"""The checksum depends on every bit and its position, and on nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.checkpoint import checksum as module
from samestep.checkpoint.checksum import MODULUS, checksum, words_of

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


def of(*tensors: torch.Tensor) -> int:
    """Return the checksum of tensors with numbers as names."""
    return checksum({str(number): tensor for number, tensor in enumerate(tensors)})


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
    assert of(tensor) == of(tensor.clone())
    assert of(tensor) != of(with_flipped_bit(tensor, bit))


@given(flips=st.lists(st.integers(0, 64 * 50 - 1), min_size=1, max_size=8, unique=True))
def test_several_flipped_bits_change_the_checksum(flips: list[int]) -> None:
    tensor = torch.zeros(50, dtype=torch.float64)
    flipped = tensor
    for bit in flips:
        flipped = with_flipped_bit(flipped, bit)
    assert of(tensor) != of(flipped)


@given(positions=st.sets(st.integers(0, 49), min_size=1))
def test_any_number_of_changed_signs_changes_the_checksum(positions: set[int]) -> None:
    """If words were as wide as weights, sums modulo a power of two could miss changes of the top bits of words."""
    tensor = torch.randn(50, dtype=torch.float64)
    negated = tensor.clone()
    negated[list(positions)] *= -1
    assert of(tensor) != of(negated)


@given(first=st.integers(0, 99), second=st.integers(0, 99))
def test_swapped_elements_change_the_checksum(first: int, second: int) -> None:
    tensor = torch.arange(100, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert (of(tensor) == of(swapped)) == (first == second)


def test_order_of_tensors_changes_the_checksum() -> None:
    one, two = torch.ones(3), torch.zeros(3)
    assert of(one, two) != of(two, one)


def test_values_that_compare_equal_have_different_checksums() -> None:
    assert of(torch.tensor(0.0)) != of(torch.tensor(-0.0))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert all(math.isnan(value) for value in nans.tolist())
    assert of(nans[:1]) != of(nans[1:])


def test_checksum_depends_on_elements_and_not_on_strides() -> None:
    tensor = torch.randn(6, 8)
    assert of(tensor.t()) == of(tensor.t().contiguous())
    assert of(tensor[:, ::2]) == of(tensor[:, ::2].clone())
    assert of(torch.randn(7).requires_grad_()) > 0
    odd = torch.arange(9, dtype=torch.int16)[1:]  # starts at an address that is not aligned for wider integers
    assert of(odd) == of(odd.clone())
    assert of(torch.tensor(3.0).expand(4)) == of(torch.full((4,), 3.0))


def test_empty_tensors_count_by_name_type_and_shape() -> None:
    assert of() == 0
    empty = {of(torch.empty(0)), of(torch.empty(0, 3)), of(torch.empty(0, dtype=torch.int32)), of()}
    assert len(empty) == 4
    assert len({of(torch.zeros(4)), of(torch.zeros(2, 2)), checksum({"other": torch.zeros(4)})}) == 3


def test_checksum_is_equal_for_all_thread_counts_and_leaves_the_generator_unchanged() -> None:
    tensor = torch.randn(3, 2**16 + 5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    module._weights.cache_clear()
    checksums = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            checksums.add(of(tensor))
    finally:
        torch.set_num_threads(threads)
    assert len(checksums) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bit", [0, 31, 32 * (2**16 - 1), 32 * 2**16, 32 * (2**17 + 4) + 31])
def test_bits_beyond_the_first_block_change_the_checksum(bit: int) -> None:
    tensor = torch.zeros(2**17 + 5)
    assert of(tensor) != of(with_flipped_bit(tensor, bit))
    assert of(torch.ones(3), tensor) != of(torch.ones(3), with_flipped_bit(tensor, bit))


def test_checksum_is_the_documented_weighted_sum() -> None:
    tensor = torch.randint(-(2**31), 2**31, (70_000, 2), dtype=torch.int32)
    positions, block = torch.arange(tensor.numel()), module._BLOCK
    powers = torch.tensor([module.signed(pow(module._FACTOR, k, MODULUS)) for k in range(tensor.numel() // block + 1)])
    factor = module._hash("0", tensor.dtype, tensor.shape)[0]
    weights = module._weights(torch.device("cpu"))[positions % block] * powers[positions // block] * factor
    assert bool((weights & 1 == 1).all())
    products = words_of(tensor).to(torch.int64) * weights
    assert of(tensor) == (int(products.sum()) + of(torch.zeros_like(tensor))) % MODULUS
