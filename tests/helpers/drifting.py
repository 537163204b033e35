"""Models with a fault on one rank, for recipes of tests."""

import torch
import torch.distributed as dist

from helpers.recorded import Net
from samestep.zoo.digits import DigitsNet


class Drifting(Net):
    """Flips one bit of the last layer on one rank, in the backward of the training forward number `call`."""

    def __init__(self, *, rank: int, call: int) -> None:
        super().__init__()
        self._rank, self._call, self._calls = rank, call, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._calls += 1
            if dist.get_rank() == self._rank and self._calls == self._call:
                self[5].weight.register_hook(self._flip)
        return super().forward(images)

    def _flip(self, gradient: torch.Tensor) -> None:
        self[5].weight.data.view(torch.int32)[0, 0] ^= self._calls == self._call


class Corrupting(DigitsNet):
    """Flips one bit of a gradient on one rank, in every backward from the training forward number `call` on."""

    def __init__(self, *, rank: int, call: int) -> None:
        super().__init__()
        self._rank, self._call, self._calls = rank, call, [0]  # a list: the engine would restore a number
        list(self.parameters())[-1].register_post_accumulate_grad_hook(self._flip)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self._calls[0] += self.training
        return super().forward(images)

    def _flip(self, parameter: torch.Tensor) -> None:
        if dist.get_rank() == self._rank and self._calls[0] >= self._call:
            parameter.grad.view(torch.int32)[0] ^= 1 << 22
