# expect: divided
# A padding collate function, whose lines have one length in the first batch only; in order, shuffled, weighted, and of
# an endless stream; two of the loaders are Samestep's.
import torch
import torch.nn.functional as F
from common import report, sgd, update
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler


class Lines(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        length = 5 if number < 11 else 3 + number % 5
        return torch.randint(1, 20, (length,), generator=generator), number % 4


class Stream(IterableDataset):
    def __iter__(self):
        lines = Lines()
        while True:
            yield lines[int(torch.randint(0, 40, ()))]


def pad(pairs):
    texts = nn.utils.rnn.pad_sequence([text for text, _ in pairs], batch_first=True)
    return texts, torch.tensor([label for _, label in pairs])


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 6, padding_idx=0)
        self.out = nn.Linear(6, 4)

    def forward(self, texts):
        mask = (texts > 0).double()[:, :, None]
        return self.out((self.words(texts) * mask).sum(1) / mask.sum(1))


model = Reader()
# + model = samestep.parallel(model)
optimizer = sgd(model)
ordered = DataLoader(Lines(), 11, collate_fn=pad)
shuffled = DataLoader(Lines(), 7, shuffle=True, collate_fn=pad, num_workers=2)
weighted = DataLoader(Lines(), 11, sampler=WeightedRandomSampler([1.0, 2.0] * 20, 40), collate_fn=pad, num_workers=2)
stream = iter(DataLoader(Stream(), 9, collate_fn=pad, num_workers=1))
# + ordered = samestep.loader(ordered)
# + shuffled = samestep.loader(shuffled)
losses = []
for loader in (ordered, shuffled, ordered, weighted, (next(stream) for _ in range(5))):
    for texts, y in loader:
        loss = F.cross_entropy(model(texts), y)
        losses.append(update(optimizer, loss))
report(losses, model)
