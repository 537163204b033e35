# expect: divided
# An LSTM forecasts the last ten values of noisy sine waves.
import torch
from common import report
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 16, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        hidden, _ = self.lstm(x)
        return self.out(hidden[:, -1])


class Waves(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        times = torch.arange(40) / 6 + 6 * torch.rand(1, generator=generator)
        values = torch.sin(times) + 0.1 * torch.randn(40, generator=generator)
        return values[:30, None], values[30:]


model = Forecast()
# + model = samestep.parallel(model)
loss_function = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses = []
for epoch in range(2):
    for x, y in DataLoader(Waves(), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
