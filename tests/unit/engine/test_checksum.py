"""The checksum depends on every bit and its place, and on nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.engine import checksum as module
from samestep.engine.checksum import checksum

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
    """A tensor of random bits, which for floating types may be no number at all."""
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
def test_any_flipped_bit_is_seen(dtype: torch.dtype, count: int, seed: int, bit: int) -> None:
    tensor = of_bytes(dtype, count, seed)
    assert checksum([tensor]) == checksum([tensor.clone()])
    assert checksum([tensor]) != checksum([with_flipped_bit(tensor, bit)])


@given(flips=st.lists(st.integers(0, 64 * 50 - 1), min_size=1, max_size=8, unique=True))
def test_several_flipped_bits_are_seen(flips: list[int]) -> None:
    tensor = torch.zeros(50, dtype=torch.float64)
    flipped = tensor
    for bit in flips:
        flipped = with_flipped_bit(flipped, bit)
    assert checksum([tensor]) != checksum([flipped])


@given(places=st.sets(st.integers(0, 49), min_size=1))
def test_signs_are_seen_however_many(places: set[int]) -> None:
    """The top bit of a word is where sums modulo a power of two are blind, if words are as wide as weights."""
    tensor = torch.randn(50, dtype=torch.float64)
    turned = tensor.clone()
    turned[list(places)] *= -1
    assert checksum([tensor]) != checksum([turned])


@given(first=st.integers(0, 99), second=st.integers(0, 99))
def test_places_matter(first: int, second: int) -> None:
    tensor = torch.arange(100, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert (checksum([tensor]) == checksum([swapped])) == (first == second)


def test_order_of_tensors_matters() -> None:
    one, two = torch.ones(3), torch.zeros(3)
    assert checksum([one, two]) != checksum([two, one])


def test_values_that_compare_equal_are_told_apart() -> None:
    assert checksum([torch.tensor(0.0)]) != checksum([torch.tensor(-0.0)])
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert all(math.isnan(value) for value in nans.tolist())
    assert checksum([nans[:1]]) != checksum([nans[1:]])


def test_tensors_of_any_layout_count_by_their_elements() -> None:
    tensor = torch.randn(6, 8)
    assert checksum([tensor.t()]) == checksum([tensor.t().contiguous()])
    assert checksum([tensor[:, ::2]]) == checksum([tensor[:, ::2].clone()])
    assert checksum([torch.randn(7).requires_grad_()]) > 0
    odd = torch.arange(9, dtype=torch.int16)[1:]  # begins where no wider integer could
    assert checksum([odd]) == checksum([odd.clone()])
    assert checksum([torch.tensor(3.0).expand(4)]) == checksum([torch.full((4,), 3.0)])


def test_nothing_has_a_checksum_too() -> None:
    assert checksum([]) == checksum([torch.empty(0)]) == 0
    assert checksum([torch.empty(0, 3), torch.ones(2)]) == checksum([torch.ones(2)])


def test_it_is_the_same_on_any_number_of_threads_and_draws_nothing() -> None:
    tensor = torch.randn(3, 2**16 + 5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    module._weights.cache_clear()
    found = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(checksum([tensor]))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bit", [0, 31, 32 * (2**16 - 1), 32 * 2**16, 32 * (2**17 + 4) + 31])
def test_bits_beyond_the_first_piece_are_seen(bit: int) -> None:
    tensor = torch.zeros(2**17 + 5)
    assert checksum([tensor]) != checksum([with_flipped_bit(tensor, bit)])
    assert checksum([torch.ones(3), tensor]) != checksum([torch.ones(3), with_flipped_bit(tensor, bit)])


def test_it_is_the_weighted_sum_that_is_described() -> None:
    values = [5, -7, 2**31 - 1]
    weights = module._weights(torch.device("cpu")).tolist()
    expected = sum(value * weight for value, weight in zip(values, weights[:3], strict=True)) % 2**64
    assert all(weight % 2 for weight in weights)
    assert checksum([torch.tensor(values, dtype=torch.int32)]) == expected
