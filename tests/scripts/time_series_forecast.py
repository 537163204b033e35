"""Forecasting of several steps: GRU encoder, decoder that reads its own output or the truth, windows of a CSV-like table."""

import random

import numpy as np
import torch
import torch.nn as nn
from sklearn.preprocessing import MinMaxScaler
from torch.utils.data import DataLoader, Dataset

INPUT_WINDOW, OUTPUT_WINDOW = 24, 6


def set_seed(seed=2021):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True


def make_series(length=460):
    t = np.arange(length)
    load = (
        10 + 0.01 * t + 3 * np.sin(2 * np.pi * t / 24) + np.sin(2 * np.pi * t / 168) + np.random.normal(0, 0.4, length)
    )
    temperature = 15 + 5 * np.sin(2 * np.pi * (t - 6) / 24) + np.random.normal(0, 0.5, length)
    weekend = ((t // 24) % 7 >= 5) * 1.0
    return np.stack([load - 1.5 * weekend, temperature, weekend], axis=1)


class WindowDataset(Dataset):
    def __init__(self, values, stride):
        self.values = values
        self.starts = range(0, len(values) - INPUT_WINDOW - OUTPUT_WINDOW + 1, stride)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        start = self.starts[index]
        middle = start + INPUT_WINDOW
        x = torch.Tensor(self.values[start:middle])
        y = torch.Tensor(self.values[middle : middle + OUTPUT_WINDOW, :1])
        return x, y


class Encoder(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.gru = nn.GRU(input_size, hidden_size, batch_first=True)

    def forward(self, x):
        _, hidden = self.gru(x)
        return hidden.squeeze(0)


class Decoder(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.cell = nn.GRUCell(1, hidden_size)
        self.linear = nn.Linear(hidden_size, 1)

    def forward(self, x, hidden):
        hidden = self.cell(x, hidden)
        return self.linear(hidden), hidden


class Forecaster(nn.Module):
    def __init__(self, input_size, hidden_size=32):
        super().__init__()
        self.encoder = Encoder(input_size, hidden_size)
        self.decoder = Decoder(hidden_size)

    def forward(self, x, y=None, teacher_forcing=0.0):
        hidden = self.encoder(x)
        value = x[:, -1, :1]
        outputs = []
        for step in range(OUTPUT_WINDOW):
            value, hidden = self.decoder(value, hidden)
            outputs.append(value)
            if y is not None and random.random() < teacher_forcing:
                value = y[:, step]
        return torch.stack(outputs, dim=1)


def train_epoch(model, loader, criterion, optimizer, device, teacher_forcing):
    model.train()
    losses = []
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = criterion(model(x, y, teacher_forcing), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return np.mean(losses)


@torch.no_grad()
def predict(model, loader, device):
    model.eval()
    predictions, truths = [], []
    for x, y in loader:
        predictions.append(model(x.to(device)).cpu().numpy())
        truths.append(y.numpy())
    return np.concatenate(predictions)[..., 0], np.concatenate(truths)[..., 0]


def main():
    set_seed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    series = make_series()
    split = 360
    scaler = MinMaxScaler().fit(series[:split])
    train_loader = DataLoader(WindowDataset(scaler.transform(series[:split]), 2), batch_size=32, shuffle=True)
    test_loader = DataLoader(WindowDataset(scaler.transform(series[split:]), 1), batch_size=50)
    model = Forecaster(series.shape[1]).to(device)
    criterion = nn.HuberLoss(delta=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    epochs = 6
    for epoch in range(epochs):
        teacher_forcing = 1 - epoch / epochs
        loss = train_epoch(model, train_loader, criterion, optimizer, device, teacher_forcing)
        predicted, truth = predict(model, test_loader, device)
        rmse = np.sqrt(((predicted - truth) ** 2).mean(axis=0))
        print(f"epoch {epoch + 1}: loss {loss:.5f}, RMSE by horizon {' '.join(f'{r:.4f}' for r in rmse)}")
    scale = scaler.data_max_[0] - scaler.data_min_[0]
    print(f"MAE of {len(truth)} windows in units: {np.abs(predicted - truth).mean() * scale:.4f}")


if __name__ == "__main__":
    main()
