"""Stochastic weight averaging and an exponential moving average by `torch.optim.swa_utils`, with `update_bn`."""

import torch
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

SEED = 3
torch.manual_seed(SEED)
device = "cuda" if torch.cuda.is_available() else "cpu"

X, y = make_classification(n_samples=520, n_features=16, n_informative=10, n_classes=3, random_state=SEED)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=SEED, stratify=y)
train_set = TensorDataset(torch.Tensor(X_train), torch.LongTensor(y_train))
test_set = TensorDataset(torch.Tensor(X_test), torch.LongTensor(y_test))
loader = DataLoader(train_set, batch_size=64, shuffle=True)
test_loader = DataLoader(test_set, batch_size=128)

model = nn.Sequential(
    nn.Linear(16, 48),
    nn.BatchNorm1d(48),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(48, 48),
    nn.BatchNorm1d(48),
    nn.ReLU(),
    nn.Linear(48, 3),
).to(device)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
swa_model = AveragedModel(model)
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
epochs, swa_start = 6, 3
scheduler = CosineAnnealingLR(optimizer, T_max=epochs)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2, anneal_strategy="linear")


@torch.no_grad()
def evaluate(net):
    net.eval()
    correct, total_loss = 0, 0.0
    for inputs, target in test_loader:
        output = net(inputs.to(device))
        total_loss += loss_fn(output, target.to(device)).item() * len(target)
        correct += (output.argmax(1).cpu() == target).sum().item()
    return total_loss / len(test_set), correct / len(test_set)


for epoch in range(epochs):
    model.train()
    running = 0.0
    for input, target in loader:
        input, target = input.to(device), target.to(device)
        optimizer.zero_grad()
        loss = loss_fn(model(input), target)
        loss.backward()
        optimizer.step()
        ema_model.update_parameters(model)
        running += loss.item()
    if epoch >= swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    test_loss, accuracy = evaluate(model)
    print(
        f"epoch {epoch}: train loss {running / len(loader):.4f}, test loss {test_loss:.4f}, accuracy {accuracy:.4f}, "
        f"lr {optimizer.param_groups[0]['lr']:.4f}"
    )

update_bn(loader, swa_model, device=device)
for name, net in (("model", model), ("SWA", swa_model), ("EMA", ema_model)):
    test_loss, accuracy = evaluate(net)
    print(f"{name:>5}: loss {test_loss:.4f}, accuracy {accuracy:.4f}")
print("models averaged:", swa_model.n_averaged.item(), "updates of EMA:", ema_model.n_averaged.item())
torch.save({"swa": swa_model.module.state_dict(), "ema": ema_model.state_dict()}, "averages.pt")
