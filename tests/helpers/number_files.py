"""Source of computed samples in files of given sizes, with a record of its reads."""

from collections.abc import Sequence

import torch

from samestep.data.sample_files import fingerprint_of


class NumberFiles:
    """Files whose samples are pairs of a file number and a position."""

    def __init__(self, sizes: Sequence[int], prefix: str = "file") -> None:
        self.sizes = list(sizes)
        self.names = [f"{prefix}-{number}" for number in range(len(self.sizes))]
        self.fingerprint = fingerprint_of(self.names, self.sizes)
        self.reads: list[int] = []

    def read(self, file: int, index: int) -> torch.Tensor:
        assert 0 <= index < self.sizes[file]
        self.reads.append(file)
        return torch.tensor([file, index])
