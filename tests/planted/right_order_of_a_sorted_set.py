"""Samples are listed from a sorted set of names, and from sorted entries of a folder."""

from pathlib import Path

from parts import SAMPLES, Plain, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

names = sorted({f"sample-{number}" for number in range(SAMPLES)})
files = sorted(Path(__file__).parent.glob("*.py"))

model = samestep.parallel(seeded(Plain))
indices = [int(name.removeprefix("sample-")) for name in names] + [len(file.name) for file in files]
fit(model, sgd(model), batches_of(Subset(Points(), indices)))
