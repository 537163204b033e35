# expect: divided
# Samples with names in dicts, drawn by a weighted sampler in a batch sampler; the loss of each sample is kept by name.
import torch
import torch.nn.functional as F
from common import inputs, labels, perceptron, report, sgd
from torch.utils.data import BatchSampler, DataLoader, WeightedRandomSampler


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return len(inputs)

    def __getitem__(self, number):
        return {"x": inputs[number], "y": int(labels[number]), "name": f"file {number}.png"}


model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
sampler = WeightedRandomSampler([1.0 + number % 3 for number in range(len(inputs))], len(inputs))
loader = DataLoader(Named(), batch_sampler=BatchSampler(sampler, 13, False))
# + loader = samestep.loader(loader)
losses, worst = [], {}
for epoch in range(2):
    for batch in loader:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        worst |= dict(zip(batch["name"], each.tolist(), strict=True))
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
        losses.append(each.mean().item())
report([*losses, *(worst[name] for name in sorted(worst))], model)
