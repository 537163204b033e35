# expect: divided
# Samples with names in dicts, drawn by a weighted sampler in a batch sampler; losses by name weigh the samples.
import torch
import torch.nn.functional as F
from common import inputs, labels, perceptron, report, sgd, update
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
        weight = torch.tensor([worst.get(name, 1.0) for name in batch["name"]])
        worst |= dict(zip(batch["name"], each.tolist(), strict=True))
        losses.append(update(optimizer, (weight * each).mean()))
report([*losses, *(worst[name] for name in sorted(worst))], model)
