# expect: divided
# Loaders with workers, a weighted sampler and an endless iterable data set; its batches are padded.
import torch
import torch.nn.functional as F
from common import report, sgd
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler


class Lines(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        length = 3 + number % 5
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
weighted = DataLoader(Lines(), 11, sampler=WeightedRandomSampler([1.0, 2.0] * 20, 40), collate_fn=pad, num_workers=2)
stream = iter(DataLoader(Stream(), 9, collate_fn=pad, num_workers=1))
losses = []
for texts, y in [*weighted, *(next(stream) for _ in range(5))]:
    loss = F.cross_entropy(model(texts), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
