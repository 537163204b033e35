"""Model with a fault on one rank, for recipes of tests."""

import torch
import torch.distributed as dist

from helpers.recorded import Net


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
