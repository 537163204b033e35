"""Training script for one device."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(2000, 64)
data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
train, test = torch.utils.data.random_split(data, [1600, 400])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    nn.Linear(64, 512),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Linear(512, 10),
)
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(3):
    model.train()
    for batch, targets in DataLoader(train, batch_size=256, shuffle=True):
        loss = functional.cross_entropy(model(batch.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = sum(
            (model(batch.to(device)).argmax(1).cpu() == targets).sum()
            for batch, targets in DataLoader(test, 256)
        )
    print(f"epoch {epoch + 1}  loss {loss:.4f}  accuracy {correct / len(test):.2%}")
torch.save(model.state_dict(), "model.pt")
