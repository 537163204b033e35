# expect: divided
# Fourier layer: real and complex FFT with complex weights, complex outputs, and a loss of their phases.
import torch
from common import report, update
from torch import nn


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        spectrum = torch.fft.rfft(x) * self.weight
        return self.head(torch.fft.irfft(spectrum, n=8)), spectrum


model = Spectral()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    out, spectrum = model(torch.randn(9, 3, 8))
    loss = (out - 1).pow(2).mean() + 0.01 * spectrum.abs().mean() + 0.01 * spectrum.real.mean()
    losses.append(update(optimizer, loss))
report(losses, model)
