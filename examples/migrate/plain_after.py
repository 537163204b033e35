"""Training loop for any number of processes: `samestep run --processes 3 plain_after.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import samestep

EPOCHS = 5

world = samestep.init(reduction="exact", threads=1)
torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
train_data, test_data = random_split(data, [1400, 397])
train_batches = samestep.loader(train_data, batch_size=64, microbatches=8, world=world)
test_batches = samestep.loader(test_data, batch_size=64, microbatches=8, world=world)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(1024, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_function = nn.CrossEntropyLoss()
engine = samestep.Engine(model, optimizer, loss_function, world=world)
checkpoints = samestep.CheckpointManager("checkpoints", engine, train_batches)

for epoch in checkpoints.epochs(EPOCHS):
    for batch in train_batches:
        engine.step(batch)
    values = engine.evaluate(test_batches, ["accuracy"])
    if world.is_main:
        print(f"epoch {epoch + 1}: accuracy {values['accuracy']:.1%}, loss {values['loss']:.4f}")
        torch.save(model.state_dict(), "digits.pt")
