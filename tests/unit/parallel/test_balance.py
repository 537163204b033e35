"""Parts of like size: no other cuts have a smaller largest part."""

from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from samestep.parallel.balance import even_parts


def largest(sizes: list[int], numbers: list[int]) -> int:
    return max(sum(s for s, n in zip(sizes, numbers, strict=True) if n == part) for part in set(numbers))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_no_cut_is_better(sizes: list[int], parts: int) -> None:
    filled = [size for size in sizes if size > 0]
    assume(len(filled) >= parts)
    numbers = even_parts(sizes, parts)
    assert numbers == sorted(numbers)
    assert {n for n, size in zip(numbers, sizes, strict=True) if size > 0} == set(range(parts))
    best = min(
        max(sum(filled[a:b]) for a, b in zip((0, *cuts), (*cuts, len(filled)), strict=True))
        for cuts in combinations(range(1, len(filled)), parts - 1)
    )
    assert largest(sizes, numbers) == best


def test_what_has_no_size_goes_with_what_is_before_it() -> None:
    assert even_parts([0, 5, 0, 5, 0], 2) == [0, 0, 0, 1, 1]
