"""Mixture of sources of samples, with weights."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

from samestep.data.streams.source import FileSource, fingerprint_of
from samestep.errors import InputError


class MixtureSource:
    """Files of several sources, from which training draws samples in proportion to weights.

    In each window of a slot, every source has a fixed number of positions, in proportion to its weight and rounded to
    whole samples. A random permutation of the window chooses the positions.

    An epoch has `samples` samples. The draws from a source continue over epochs: it is passed through again, in a new
    order, when all its samples were drawn. In each pass, every slot draws each sample of its range once. A sample that
    is drawn twice in an epoch has other random numbers for augmentation. With `drop_last`, the samples of the batch
    that is left out are skipped.

    Without `shuffle`, and in evaluation, each sample of all sources occurs once.

    Attributes:
        sources: the sources by name.
        weights: weight of each source by name.
        samples: number of samples in an epoch.

    Args:
        sources: the sources by name.
        weights: positive weight of each source; only their ratios matter.
        samples: samples of an epoch; None for as many as the sources have together.

    Raises:
        InputError: names and weights do not fit together, or a weight is not positive.
    """

    def __init__(
        self, sources: Mapping[str, FileSource], weights: Mapping[str, float], *, samples: int | None = None
    ) -> None:
        _require_weights(sources, weights)
        self.sources = dict(sources)
        self.weights = {name: float(weights[name]) for name in sources}
        self._members = list(sources.values())
        self._starts = [0, *accumulate(len(source.names) for source in self._members)]
        self.samples = sum(sum(source.sizes) for source in self._members) if samples is None else samples
        if self.samples < 1:
            raise _mixture_error(f"an epoch of a mixture has {self.samples} samples", "samples >= 1", "leave it out")

    @property
    def names(self) -> Sequence[str]:
        """Names of the files of all sources, each with the name of its source."""
        return [f"{key}/{name}" for key, source in self.sources.items() for name in source.names]

    @property
    def sizes(self) -> Sequence[int]:
        """Sizes of the files of all sources."""
        return [size for source in self._members for size in source.sizes]

    @property
    def fingerprint(self) -> str:
        """Hash of the names and fingerprints of the sources."""
        return fingerprint_of(list(self.sources), [], [source.fingerprint for source in self._members])

    def read(self, file: int, index: int) -> Any:
        """Return a sample of a file of any source."""
        number = bisect_right(self._starts, file) - 1
        return self._members[number].read(file - self._starts[number], index)

    def prepare(self, files: Sequence[int]) -> None:
        """Prepare the files of each source."""
        for number, source in enumerate(self._members):
            start, stop = self._starts[number], self._starts[number + 1]
            source.prepare([file - start for file in files if start <= file < stop])


def _require_weights(sources: Mapping[str, FileSource], weights: Mapping[str, float]) -> None:
    if not sources or set(sources) != set(weights):
        raise _mixture_error(
            f"a mixture has the sources {sorted(sources)} and weights for {sorted(weights)}",
            "a weight for each source",
            "weights={'web': 0.7, 'code': 0.3}",
        )
    for name, weight in weights.items():
        if not 0 < weight < math.inf:
            raise _mixture_error(f"the weight of {name!r} is {weight}", "a positive number", f"leave out {name!r}")
    for name, source in sources.items():
        if isinstance(source, MixtureSource):
            raise _mixture_error(
                f"the source {name!r} of a mixture is a mixture", "sources of files", "one mixture of all sources"
            )


def _mixture_error(value: str, expected: str, fix: str) -> InputError:
    return InputError(value, expected, fix, code="E_MIXTURE")


@lru_cache(1024)
def quotas(size: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the positions of each source among `size` ones: the largest-remainder rule, in exact arithmetic."""
    exact = [Fraction(weight) for weight in weights]
    shares = [size * weight / sum(exact) for weight in exact]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda number: (counts[number] - shares[number], number))
    for number in by_remainder[: size - sum(counts)]:
        counts[number] += 1
    return tuple(counts)
