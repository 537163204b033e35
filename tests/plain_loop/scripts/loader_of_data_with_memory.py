# expect: mixed
# Data that depend on earlier reads: a window of seen samples, counts per sample, an iterator, a cache of augmented
# samples, mixing with the last batch, and batches by tokens; two of the loaders are read by turns.
import random
from collections import deque
from functools import lru_cache

import torch
import torch.nn.functional as F
from common import inputs, labels, perceptron, report, sgd, update
from torch.utils.data import DataLoader, TensorDataset, default_collate

noise = iter(torch.randn(1000, 12, generator=torch.Generator().manual_seed(4)))


class Window(torch.utils.data.Dataset):
    def __init__(self):
        self.seen = deque(maxlen=30)
        self.counts = torch.zeros(len(inputs))

    def __len__(self):
        return len(inputs)

    def __getitem__(self, number):
        self.counts[number] += 1
        mixed = inputs[number] / self.counts[number]
        if len(self.seen) > 20:
            mixed = mixed + 0.3 * random.choice(self.seen)
        self.seen.append(inputs[number])
        return mixed, labels[number]


class Stream(Window):
    def __getitem__(self, number):
        return inputs[number] + next(noise), labels[number]


class Cached(Window):
    @lru_cache(maxsize=7)  # noqa: B019
    def __getitem__(self, number):
        return inputs[number] + torch.randn(12), labels[number]


class Mixed:
    last = None

    def __call__(self, samples):
        x, y = default_collate(samples)
        mixed = x if self.last is None or len(self.last) != len(x) else x + random.betavariate(2, 2) * self.last
        self.last = x
        return mixed, y


def by_tokens(sizes):
    start = 0
    for size in sizes:
        yield list(range(start, start + size))
        start += size


model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
pairs = TensorDataset(inputs, labels)
window = DataLoader(Window(), 11, shuffle=True)
stream = DataLoader(Stream(), 11, shuffle=True)
cached = DataLoader(Cached(), 11, shuffle=True)
mixed = DataLoader(pairs, 11, shuffle=True, collate_fn=Mixed())
tokens = DataLoader(pairs, batch_sampler=list(by_tokens([1, 4, 20, 2, 33, 50])))
# + window, stream, cached, mixed, tokens = map(samestep.loader, (window, stream, cached, mixed, tokens))
losses = []
for _ in range(2):
    for number, loaded in enumerate([zip(window, stream, strict=True), zip(cached), zip(mixed), zip(tokens)]):
        for batches in loaded:
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                losses.append(update(optimizer, loss) + number)
report([*losses, torch.rand(()), random.random()], model)
