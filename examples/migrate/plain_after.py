"""Training loop for any number of processes: `samestep run --processes 3 plain_after.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import samestep

EPOCHS = 5


def evaluate(model, batches):
    model.eval()
    correct = loss = 0
    with torch.no_grad():
        for inputs, targets in batches:
            outputs = model(inputs)
            correct += (outputs.argmax(dim=1) == targets).sum().item()
            loss += loss_function(outputs, targets).item() * len(targets)
    model.train()
    return correct / len(batches.dataset), loss / len(batches.dataset)


torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
train_data, test_data = random_split(data, [1400, 397])
train_batches = samestep.loader(train_data, batch_size=64)
test_batches = DataLoader(test_data, batch_size=64)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(1024, 10),
)
model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_function = nn.CrossEntropyLoss()
checkpoints = samestep.CheckpointManager("checkpoints", model, train_batches, optimizer=optimizer)

for epoch in checkpoints.epochs(EPOCHS):
    for inputs, targets in train_batches:
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()
        optimizer.step()
    accuracy, loss = evaluate(model, test_batches)
    if samestep.is_main():
        print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}, loss {loss:.4f}")
        torch.save(model.state_dict(), "digits.pt")
