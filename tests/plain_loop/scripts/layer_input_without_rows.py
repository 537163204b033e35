# expect: divided
# Prompt tuning: a trained prompt, a temperature and a weight of another network belong to the whole batch.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x, prompt, temperature, weight):
        x = torch.cat([prompt.expand(len(x), -1, -1), x], dim=1)
        return self.head(self.net(x)[0][:, -1]) @ weight / temperature


model = Prompted()
prompt, temperature = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.tensor(2.0))
generator, code = nn.Linear(5, 9), torch.randn(5)
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam([prompt, temperature, *generator.parameters(), *model.parameters()], lr=0.02)
losses = []
for batch in (11, 11, 11, 4, 11, 11, 4, 11):
    weight = generator(code).view(3, 3)
    logits = model(torch.randn(batch, 3, 6), prompt, temperature, weight)
    loss = F.cross_entropy(logits, torch.randint(0, 3, (batch,)))
    losses.append(update(optimizer, loss))
report([*losses, *prompt.flatten(), *temperature.flatten()], model, generator)
