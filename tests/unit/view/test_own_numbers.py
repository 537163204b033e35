"""Random numbers of own rows; `test_draws.py` has them in torch's functions."""

from __future__ import annotations

import pytest
import torch

from samestep.view.own_numbers import default_generator, like


def test_the_default_generator_is_put_back() -> None:
    before = torch.get_rng_state()
    with default_generator(torch.Generator().manual_seed(5)):
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_without_a_generator_the_default_one_advances() -> None:
    before = torch.get_rng_state()
    with default_generator(None):
        torch.rand(3)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (1, 2, 3, 0), (3, 0, 1, 2)])
def test_memory_has_the_order_of_the_whole_batch(order: tuple[int, ...], rows: int) -> None:
    sizes = (6, 3, 4, 5)
    inverse = [order.index(dimension) for dimension in range(4)]

    def ordered(count: int) -> torch.Tensor:
        given = (count, *sizes[1:])
        return torch.empty([given[dimension] for dimension in order]).permute(inverse)

    whole = ordered(6)
    for own in (whole[:rows], torch.empty_like(whole[:rows]), ordered(rows)):
        assert like(own, sizes).stride() == whole.stride()
