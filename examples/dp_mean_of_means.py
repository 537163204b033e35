"""Mean of means over two devices with three tokens and one token, and the mean of all tokens."""

import torch
from torch import nn

import samestep

# The loss of a token is its value; 0 is padding.
LINES = torch.tensor([[0.50, 0.60, 0.76], [0.24, 0.00, 0.00]], dtype=torch.float64)


class Scale(nn.Module):
    """One weight of 1, so that loss and gradient of a token equal the value of the token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight * tokens


def mean_of_means(model: nn.Module, lines: torch.Tensor, devices: int) -> torch.Tensor:
    """Return the mean of the replicas' losses, as common scripts with nn.DataParallel do."""
    means = []
    for chunk in lines.chunk(devices):
        losses = model(chunk)
        means.append(losses.sum() / (chunk > 0).sum())
    return torch.stack(means).mean()


def summed(outputs: torch.Tensor, lines: torch.Tensor) -> samestep.Loss:
    """Return a sum and a count; the engine divides once after all devices."""
    return samestep.Loss(outputs.sum(), (lines > 0).sum())


def both() -> dict[str, tuple[float, float]]:
    """Return loss and gradient of both methods."""
    model = Scale()
    loss = mean_of_means(model, LINES, devices=2)
    loss.backward()
    assert model.weight.grad is not None
    results = {"mean of the devices' means": (loss.item(), model.weight.grad.item())}
    with samestep.start(device="cpu", strategy=samestep.StrategyConfig(name="dp", devices=2)) as world:
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = samestep.Engine(model, optimizer, summed, world=world)
        pairs = list(zip(LINES, LINES, strict=True))
        (batch,) = samestep.loader(pairs, batch_size=2, microbatches=2, world=world)
        result = engine.step(batch)
    return results | {"mean of all tokens, by dp": (result.loss, result.grad_norm)}


if __name__ == "__main__":
    for name, (loss, slope) in both().items():
        print(f"{name}: loss {loss:.3f}, gradient {slope:.3f}")
