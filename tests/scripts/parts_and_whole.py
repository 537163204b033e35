"""A part of a model called alone, the whole model and another part in turn, with parameters held in many ways."""

import copy

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.head(self.encoder(x)) * self.scale


def make_optimizer(net):
    head = [*net.head.parameters(), net.scale]
    return torch.optim.Adam([{"params": net.encoder.parameters()}, {"params": head, "lr": 1e-2}])


net = Net()
average = copy.deepcopy(net).requires_grad_(False)
params = list(net.parameters())
by_name = dict(net.named_parameters())
optimizer = make_optimizer(net)
gradients = []
handle = net.head.weight.register_hook(lambda gradient: gradients.append(1))
net.head.weight.tag = "head"
x = torch.randn(48, 16)
y = torch.randint(0, 10, (48,))

for step in range(12):
    optimizer.zero_grad()
    if step % 2 == 0:
        z = net.encoder(x)
        loss = nn.functional.cross_entropy(net.head(z), y) - z.pow(2).mean() * 0.1
    else:
        loss = nn.functional.cross_entropy(net(x), y)
    loss = loss + 1e-3 * sum(p.pow(2).sum() for p in params)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    with torch.no_grad():
        for mean, p in zip(average.parameters(), net.parameters()):
            mean.mul_(0.9).add_(p, alpha=0.1)
    same = all(by_name[name] is p for name, p in net.named_parameters())
    print(f"{step} loss {loss.item():.4f} norm {norm:.4f} {same} {net.head.weight.tag} {len(gradients)}")

torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "average": average.state_dict()}, "all.pt")
torch.save(net, "net.pt")
handle.remove()
copied = copy.deepcopy(net).eval()
with torch.inference_mode():
    print(f"copy {nn.functional.cross_entropy(copied(x), y).item():.4f}")
    print(f"average {nn.functional.cross_entropy(average(x), y).item():.4f}")

saved = torch.load("all.pt", weights_only=False)
for name, value in saved["model"].items():
    print(f"{name} {tuple(value.shape)} {value.norm().item():.4f}")
net.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
for _ in range(4):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
print(f"continued {nn.functional.cross_entropy(net(x), y).item():.4f} {len(gradients)}")
loaded = torch.load("net.pt", weights_only=False)
print(f"loaded {nn.functional.cross_entropy(loaded(x), y).item():.4f} {isinstance(loaded.head.weight, nn.Parameter)}")

saved = torch.load("all.pt", weights_only=False)  # the steps above have changed the state in `saved`
second = Net()
second.load_state_dict(saved["model"])
resumed = make_optimizer(second)
resumed.load_state_dict(saved["optimizer"])  # before the first call
for _ in range(3):
    resumed.zero_grad()
    nn.functional.cross_entropy(second(x), y).backward()
    resumed.step()
print(f"resumed {nn.functional.cross_entropy(second(x), y).item():.4f}")
