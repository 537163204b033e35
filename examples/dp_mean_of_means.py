"""Two devices, three tokens on one and one on the other: the mean of their means is not the mean."""

import torch
from torch import nn

import samestep

# The loss of each token is its number; a 0 fills up and counts for nothing.
LINES = torch.tensor([[0.50, 0.60, 0.76], [0.24, 0.00, 0.00]], dtype=torch.float64)


class Scale(nn.Module):
    """One weight, which is 1, so that a token's loss and the slope of its loss are the token's number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight * tokens


def mean_of_means(model: nn.Module, lines: torch.Tensor, devices: int) -> torch.Tensor:
    """What scripts do with nn.DataParallel: a loss in each replica, gathered, and the mean of that."""
    means = []
    for part in lines.chunk(devices):
        losses = model(part)
        means.append(losses.sum() / (part > 0).sum())
    return torch.stack(means).mean()


def summed(outputs: torch.Tensor, lines: torch.Tensor) -> samestep.Loss:
    """A sum and a count, which are divided once, when all devices are done."""
    return samestep.Loss(outputs.sum(), (lines > 0).sum())


def both() -> dict[str, tuple[float, float]]:
    """Loss and gradient by either way."""
    model = Scale()
    loss = mean_of_means(model, LINES, devices=2)
    loss.backward()
    assert model.weight.grad is not None
    found = {"mean of the devices' means": (loss.item(), model.weight.grad.item())}
    with samestep.start(device="cpu", strategy=samestep.StrategyPart(name="dp", devices=2)) as world:
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = samestep.Engine(model, optimizer, summed, world=world)
        pairs = list(zip(LINES, LINES, strict=True))
        (batch,) = samestep.loader(pairs, batch_size=2, shards=2, world=world)
        result = engine.step(batch)
    return found | {"mean of all tokens, by dp": (result.loss, result.grad_norm)}


if __name__ == "__main__":
    for name, (loss, slope) in both().items():
        print(f"{name}: loss {loss:.3f}, gradient {slope:.3f}")
