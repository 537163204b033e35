"""Layers whose products two ranks divide: by hand, as it is often written, and by a plan.

python examples/parallel_linear.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep
from samestep import StrategyPart

PLAN = StrategyPart(name="tp", plan={"up": "column", "down": "row"})
SAMPLES, INPUTS, WIDTH, CLASSES = 24, 12, 64, 4


class Net(nn.Module):
    """A layer, and two of which one widens and the other narrows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(INPUTS, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.relu(self.up(torch.tanh(self.first(inputs))))))


class ByHand(nn.Module):
    """The same with a part of `up` and `down` on each rank; it runs, and it is wrong."""

    def __init__(self, whole: Net) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.first, self.dropout = whole.first, whole.dropout
        self.up = nn.Parameter(whole.up.weight.detach().chunk(size)[rank].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach().chunk(size)[rank].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(size, dim=1)[rank].clone())
        self.down_bias = whole.down.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # Backward ends here with the part of this rank's columns: nobody adds up the gradient of what comes before.
        hidden = torch.relu(functional.linear(torch.tanh(self.first(inputs)), self.up, self.up_bias))
        # Drawn for a part: every rank drops the same of its columns, and one process drops others.
        outputs = functional.linear(self.dropout(hidden), self.down)
        dist.all_reduce(outputs)  # of numbers, which autograd does not see
        return outputs + self.down_bias


def net_and_data() -> tuple[Net, TensorDataset]:
    """The same on every rank."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, INPUTS, dtype=torch.float64)
    return Net().double(), TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))


def by_hand() -> tuple[float, torch.Tensor]:
    """The loss, and the gradient of the first layer."""
    with samestep.start(device="cpu"):
        whole, data = net_and_data()
        inputs, targets = data.tensors
        net = ByHand(whole)
        torch.manual_seed(0)
        loss = functional.cross_entropy(net(inputs), targets)
        loss.backward()
        return loss.item(), net.first.weight.grad


def by_engine(strategy: StrategyPart | None) -> tuple[float, torch.Tensor]:
    """The same of one step of an engine."""
    with samestep.start(device="cpu", strategy=strategy) as world:
        net, data = net_and_data()
        before = net.first.weight.detach().clone()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)  # moves weights by their gradient
        engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world)
        (batch,) = samestep.loader(data, batch_size=SAMPLES, shards=2, world=world)
        loss = engine.step(batch).loss
        return loss, before - net.first.weight.detach()


def main() -> None:
    loss, gradient = samestep.launch(by_engine, None, processes=1)
    print(f"one process:          loss {loss:.4f}, gradient of the first layer {gradient.norm():.4f}")
    for name, (other, found) in {
        "by hand on two ranks:": samestep.launch(by_hand, processes=2),
        "by a plan on two:    ": samestep.launch(by_engine, PLAN, processes=2),
    }.items():
        equal = abs(other - loss) < 1e-12 and bool((found - gradient).abs().max() < 1e-12)
        print(
            f"{name} loss {other:.4f}, gradient of the first layer {found.norm():.4f}, {'equal' if equal else 'wrong'}"
        )


if __name__ == "__main__":
    main()
