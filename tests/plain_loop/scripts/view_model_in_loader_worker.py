# expect: divided
# A frozen model computes samples in a worker process of the loader.
import torch
import torch.nn.functional as F
from common import inputs, labels, perceptron, report, sgd, update
from torch.utils.data import DataLoader, Dataset

encoder = perceptron(12, 12).requires_grad_(False)


class Encoded(Dataset):
    def __len__(self):
        return 110

    def __getitem__(self, index):
        return encoder(inputs[index] + torch.zeros(4, 12)).mean(0), labels[index]


model = perceptron()
# + encoder = samestep.parallel(encoder)
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in DataLoader(Encoded(), 11, num_workers=1):
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
report(losses, model)
