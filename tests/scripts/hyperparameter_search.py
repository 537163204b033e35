"""Search of hyper-parameters: four models are trained one after the other, the best one is kept and tested."""

import copy
import itertools
import json

import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
X, y = load_wine(return_X_y=True)
X_rest, X_test, y_rest, y_test = train_test_split(X, y, test_size=0.25, random_state=0)
X_train, X_val, y_train, y_val = train_test_split(X_rest, y_rest, test_size=0.25, random_state=0)
scaler = StandardScaler().fit(X_train)


def tensors(X, y):
    return TensorDataset(torch.Tensor(scaler.transform(X)), torch.LongTensor(y))


train_set, val_set, test_set = tensors(X_train, y_train), tensors(X_val, y_val), tensors(X_test, y_test)
search_space = {"hidden": [16, 64], "optimizer": ["sgd", "adam"]}


def build(hidden, optimizer):
    model = nn.Sequential(nn.Linear(13, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3)).to(device)
    if optimizer == "sgd":
        return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return model, optim.Adam(model.parameters(), lr=0.01)


@torch.no_grad()
def score(model, dataset):
    model.eval()
    inputs, targets = dataset.tensors
    logits = model(inputs.to(device)).cpu()
    return nn.functional.cross_entropy(logits, targets).item(), (logits.argmax(1) == targets).sum().item() / len(
        targets
    )


history = []
best = {"loss": float("inf")}
for number, values in enumerate(itertools.product(*search_space.values())):
    params = dict(zip(search_space, values))
    torch.manual_seed(100 + number)
    model, optimizer = build(**params)
    loader = DataLoader(train_set, batch_size=25, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
        val_loss, val_acc = score(model, val_set)
        print(
            f"trial {number} {params} epoch {epoch}: loss {loss.item():.4f}, validation {val_loss:.4f} ({val_acc:.3f})"
        )
    history.append({**params, "loss": round(val_loss, 4), "accuracy": round(val_acc, 4)})
    if val_loss < best["loss"]:
        best = {"loss": val_loss, "params": params, "state": copy.deepcopy(model.state_dict())}
    del model, optimizer

with open("trials.json", "w") as f:
    json.dump(history, f, indent=2)
model, _ = build(**best["params"])
model.load_state_dict(best["state"])
test_loss, test_acc = score(model, test_set)
print(f"best: {best['params']}, validation loss {best['loss']:.4f}, test loss {test_loss:.4f}, accuracy {test_acc:.4f}")
with open("trials.json") as f:
    print("accuracies:", [trial["accuracy"] for trial in json.load(f)])
