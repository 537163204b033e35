"""Nonlinear regression by L-BFGS with strong Wolfe line search: the closure runs forward and backward many times."""

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import make_friedman1
from sklearn.preprocessing import StandardScaler

np.random.seed(0)
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

X, y = make_friedman1(n_samples=250, n_features=8, noise=0.4, random_state=0)
X = StandardScaler().fit_transform(X)
y = StandardScaler().fit_transform(y[:, None])
train_x, test_x = torch.Tensor(X[:175]).to(device), torch.Tensor(X[175:]).to(device)
train_y, test_y = torch.Tensor(y[:175]).to(device), torch.Tensor(y[175:]).to(device)


class Sequence(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.hidden = nn.Linear(features, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


model = Sequence(X.shape[1]).to(device)
criterion = nn.MSELoss()
optimizer = optim.LBFGS(model.parameters(), lr=0.8, max_iter=5, history_size=10, line_search_fn="strong_wolfe")
calls = 0


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    out = model(train_x)
    penalty = sum((p**2).sum() for p in model.parameters())
    loss = criterion(out, train_y) + 1e-3 * penalty
    loss.backward()
    return loss


for i in range(10):
    loss = optimizer.step(closure)
    with torch.no_grad():
        test_loss = criterion(model(test_x), test_y)
    print(f"STEP {i}: loss {loss.item():.5f}, test loss {test_loss.item():.5f}, evaluations {calls}")

with torch.no_grad():
    pred = model(test_x).cpu().numpy()
r2 = 1 - ((pred - y[175:]) ** 2).sum() / ((y[175:] - y[175:].mean()) ** 2).sum()
np.savetxt("predictions.csv", np.hstack([pred, y[175:]]), delimiter=",", header="predicted,true")
print(f"R2 on the test set: {r2:.4f}")
