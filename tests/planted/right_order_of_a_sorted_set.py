"""Samples are listed from a sorted set of names, and from sorted entries of a folder."""

from pathlib import Path

from parts import SAMPLES, Plain, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

names = sorted({f"sample-{number}" for number in range(SAMPLES)})
files = sorted(Path(__file__).parent.glob("*.py"))

with samestep.start() as world:
    model = seeded(Plain)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    indices = [int(name.removeprefix("sample-")) for name in names] + [len(file.name) for file in files]
    fit(engine, batches_of(world, Subset(Points(), indices)))
