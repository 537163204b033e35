"""Tensor parallelism on two ranks: a common manual implementation, and a plan.

python examples/parallel_linear.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import samestep
from samestep.config import StrategyConfig

PLAN = {"up": "column", "down": "row"}
TP = StrategyConfig(name="tp")
SAMPLES, INPUTS, WIDTH, CLASSES = 24, 12, 64, 4
Result = tuple[float, torch.Tensor]


class Net(nn.Module):
    """Three layers; the plan divides the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = (
            nn.Linear(INPUTS, 16),
            nn.Linear(16, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
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
        hidden = torch.relu(
            functional.linear(torch.tanh(self.first(inputs)), self.up, self.up_bias)
        )
        # Each rank draws the same mask for its columns, and one process draws another.
        outputs = functional.linear(self.dropout(hidden), self.down)
        dist.all_reduce(outputs)  # not recorded by autograd
        return outputs + self.down_bias


def net_and_data() -> tuple[Net, torch.Tensor, torch.Tensor]:
    """Return the same model and data on every rank."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, INPUTS, dtype=torch.float64)
    return Net().double(), inputs, inputs[:, :CLASSES].argmax(dim=1)


def result_of(
    net: nn.Module, first: nn.Linear, inputs: torch.Tensor, targets: torch.Tensor
) -> Result:
    """Return the loss and the gradient of the first layer."""
    torch.manual_seed(0)
    loss = functional.cross_entropy(net(inputs), targets)
    loss.backward()
    gradient = first.weight.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):  # of which this rank has a part
        gradient = gradient.full_tensor()
    return loss.item(), gradient


def by_hand() -> Result:
    samestep.init(device="cpu", strategy=TP)
    net, inputs, targets = net_and_data()
    return result_of(ByHand(net), net.first, inputs, targets)


def by_plan() -> Result:
    samestep.init(device="cpu", strategy=TP)
    net, inputs, targets = net_and_data()
    samestep.parallel(net, strategy=TP, tensor_plan=PLAN)
    net(inputs)  # the first call is computed whole
    return result_of(net, net.first, inputs, targets)


def main() -> None:
    loss, gradient = samestep.launch(by_plan, processes=1)
    print(
        f"one process:          loss {loss:.4f}, gradient of the first layer {gradient.norm():.4f}"
    )
    for name, function in {
        "by hand on two ranks:": by_hand,
        "by a plan on two:    ": by_plan,
    }.items():
        other, other_gradient = samestep.launch(function, processes=2)
        equal = abs(other - loss) < 1e-12 and bool((other_gradient - gradient).abs().max() < 1e-12)
        verdict = "equal" if equal else "wrong"
        print(
            f"{name} loss {other:.4f}, gradient of the first layer {other_gradient.norm():.4f}, {verdict}"
        )


if __name__ == "__main__":
    main()
