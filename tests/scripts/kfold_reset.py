"""K-fold cross-validation with SubsetRandomSampler: the weights of one model are reset for each fold."""

import os

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import KFold
from sklearn.preprocessing import scale
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler


def reset_weights(m):
    """Reset weights, to avoid leakage between folds."""
    if type(m) == nn.Linear:  # noqa: E721
        print(f"Reset trainable parameters of layer = {m}")
        m.reset_parameters()
    elif hasattr(m, "reset_running_stats"):
        m.reset_running_stats()


class TumourDataset(Dataset):
    def __init__(self):
        data = load_breast_cancer()
        self.x = torch.Tensor(scale(data.data)[:330])
        self.y = torch.Tensor(data.target[:330]).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


if __name__ == "__main__":
    k_folds = 4
    num_epochs = 2
    torch.manual_seed(42)
    np.random.seed(42)
    dataset = TumourDataset()
    kfold = KFold(n_splits=k_folds, shuffle=True, random_state=1)
    network = nn.Sequential(nn.Linear(30, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 1))
    loss_function = nn.BCEWithLogitsLoss()
    results = {}
    print("--------------------------------")
    for fold, (train_ids, test_ids) in enumerate(kfold.split(dataset)):
        print(f"FOLD {fold}: {len(train_ids)} rows for training, {len(test_ids)} for the test")
        trainloader = DataLoader(dataset, batch_size=60, sampler=SubsetRandomSampler(train_ids))
        testloader = DataLoader(dataset, batch_size=60, sampler=SubsetRandomSampler(test_ids))
        network.apply(reset_weights)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        for epoch in range(num_epochs):
            network.train()
            current_loss = 0.0
            for i, (inputs, targets) in enumerate(trainloader):
                optimizer.zero_grad()
                outputs = network(inputs)
                loss = loss_function(outputs, targets)
                loss.backward()
                optimizer.step()
                current_loss += loss.item()
            print(f"Epoch {epoch + 1}: loss {current_loss / len(trainloader):.4f}")
        save_path = f"./model-fold-{fold}.pth"
        torch.save(network.state_dict(), save_path)

        correct, total = 0, 0
        network.eval()
        with torch.no_grad():
            for inputs, targets in testloader:
                outputs = network(inputs)
                predicted = torch.sigmoid(outputs) > 0.5
                total += targets.size(0)
                correct += (predicted == targets).sum().item()
        print(f"Accuracy for fold {fold}: {100.0 * correct / total:.2f} %")
        print("--------------------------------")
        results[fold] = 100.0 * (correct / total)

    print(f"K-FOLD CROSS VALIDATION RESULTS FOR {k_folds} FOLDS")
    for key, value in results.items():
        print(f"Fold {key}: {value:.2f} %")
    print(f"Average: {sum(results.values()) / len(results):.2f} % +- {np.std(list(results.values())):.2f}")
    print("files:", sorted(name for name in os.listdir(".") if name.startswith("model-fold")))
