"""nn.DataParallel with the loss inside the replicas, then `loss.mean()`: a mean of means over uneven chunks.

Mistake: replicas receive chunks of different size (a last batch of 5 samples becomes 2, 2 and 1, and the fourth GPU has
none), and in the mean of their means the single sample has twice the weight of the others.
Rule: only calls of the model are divided; the loss is the mean over the batch.

Without GPUs, nn.DataParallel silently calls the bare module, and the result is correct. This example therefore writes
out scatter (`Tensor.chunk`), replicas and gather as on four GPUs.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep


class ModelWithLoss(nn.Module):
    """Model that computes the loss in the replica, so that device 0 does not gather the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.layer(inputs), targets)


def model_and_data() -> tuple[ModelWithLoss, TensorDataset]:
    """Return a linear model and a batch of 5 samples."""
    torch.manual_seed(0)
    inputs = torch.randn(5, 4, dtype=torch.float64)
    return ModelWithLoss(), TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))


def one_device() -> float:
    """Return the mean over the batch."""
    model, data = model_and_data()
    with torch.no_grad():
        return float(model(*data.tensors))


def usual_way() -> float:
    """Scatter to four replicas, compute a loss in each, gather, average."""
    model, data = model_and_data()
    chunks = zip(*(tensor.chunk(4) for tensor in data.tensors), strict=True)
    with torch.no_grad():
        return float(torch.stack([model(inputs, targets) for inputs, targets in chunks]).mean())


def samestep_way() -> float:
    """Four ranks with 1, 1, 1 and 2 samples. The first call of a kind is computed whole; the second is divided."""
    samestep.init(device="cpu")
    model, data = model_and_data()
    model = samestep.parallel(model, strict=True)
    with torch.no_grad():
        model(*data.tensors)
        return float(model(*data.tensors))


def main() -> tuple[float, float, float]:
    """Print and return the loss of each method."""
    losses = one_device(), usual_way(), samestep.launch(samestep_way, processes=4)
    for name, loss in zip(
        ("one device", "DataParallel on 4", "samestep on 4"), losses, strict=True
    ):
        print(f"{name:17}  loss {loss:.12f}")
    return losses


if __name__ == "__main__":
    main()
