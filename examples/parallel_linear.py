"""Tensor parallelism on two ranks: a common manual implementation, and a plan.

python examples/parallel_linear.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep
from samestep import StrategyConfig

PLAN = {"up": "column", "down": "row"}
TP = StrategyConfig(name="tp")
SAMPLES, INPUTS, WIDTH, CLASSES = 24, 12, 64, 4


class Net(nn.Module):
    """Three layers; the plan divides the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(INPUTS, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.relu(self.up(torch.tanh(self.first(inputs))))))


class ByHand(nn.Module):
    """Manual division of `up` and `down` over ranks, with a wrong result."""

    def __init__(self, whole: Net) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.first, self.dropout = whole.first, whole.dropout
        self.up = nn.Parameter(whole.up.weight.detach().chunk(size)[rank].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach().chunk(size)[rank].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(size, dim=1)[rank].clone())
        self.down_bias = whole.down.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # The gradient of the inputs covers only the columns of this rank; no all-reduce adds the other ranks'.
        hidden = torch.relu(functional.linear(torch.tanh(self.first(inputs)), self.up, self.up_bias))
        # Each rank draws the same mask for its columns, and one process draws another.
        outputs = functional.linear(self.dropout(hidden), self.down)
        dist.all_reduce(outputs)  # not recorded by autograd
        return outputs + self.down_bias


def net_and_data() -> tuple[Net, TensorDataset]:
    """Return the same model and data on every rank."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, INPUTS, dtype=torch.float64)
    return Net().double(), TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))


def by_hand() -> tuple[float, torch.Tensor]:
    """Return the loss and the gradient of the first layer."""
    with samestep.start(device="cpu"):
        whole, data = net_and_data()
        inputs, targets = data.tensors
        net = ByHand(whole)
        torch.manual_seed(0)
        loss = functional.cross_entropy(net(inputs), targets)
        loss.backward()
        return loss.item(), net.first.weight.grad


def by_engine(strategy: StrategyConfig | None) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of one engine step."""
    with samestep.start(device="cpu", strategy=strategy) as world:
        net, data = net_and_data()
        before = net.first.weight.detach().clone()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)  # the step is the gradient
        config = samestep.StepConfig(tensor_plan=PLAN)
        engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world, config=config)
        (batch,) = samestep.loader(data, batch_size=SAMPLES, microbatches=2, world=world)
        loss = engine.step(batch).loss
        return loss, before - net.first.weight.detach()


def main() -> None:
    loss, gradient = samestep.launch(by_engine, None, processes=1)
    print(f"one process:          loss {loss:.4f}, gradient of the first layer {gradient.norm():.4f}")
    for name, (other, other_gradient) in {
        "by hand on two ranks:": samestep.launch(by_hand, processes=2),
        "by a plan on two:    ": samestep.launch(by_engine, TP, processes=2),
    }.items():
        equal = abs(other - loss) < 1e-12 and bool((other_gradient - gradient).abs().max() < 1e-12)
        verdict = "equal" if equal else "wrong"
        print(f"{name} loss {other:.4f}, gradient of the first layer {other_gradient.norm():.4f}, {verdict}")


if __name__ == "__main__":
    main()
