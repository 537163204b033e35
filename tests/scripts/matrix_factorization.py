"""Recommender by matrix factorization: sparse embeddings with SparseAdam, biases with SGD, hit rate of ranked items."""

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(9)
np.random.seed(9)


def make_ratings(users=60, items=45, count=420):
    taste, kind = np.random.randn(users, 3), np.random.randn(items, 3)
    pairs = np.random.choice(users * items, count, replace=False)
    user, item = pairs // items, pairs % items
    rating = np.clip(np.round(3 + (taste[user] * kind[item]).sum(1) + 0.3 * np.random.randn(count)), 1, 5)
    return pd.DataFrame({"user": user, "item": item, "rating": rating})


class RatingsDataset(Dataset):
    def __init__(self, frame):
        self.users = torch.LongTensor(frame.user.tolist())
        self.items = torch.LongTensor(frame.item.tolist())
        self.ratings = torch.Tensor(frame.rating.tolist())

    def __len__(self):
        return len(self.ratings)

    def __getitem__(self, idx):
        return self.users[idx], self.items[idx], self.ratings[idx]


class MatrixFactorization(nn.Module):
    def __init__(self, n_users, n_items, mean, n_factors=8):
        super().__init__()
        self.user_factors = nn.Embedding(n_users, n_factors, sparse=True)
        self.item_factors = nn.Embedding(n_items, n_factors, sparse=True)
        self.user_bias = nn.Embedding(n_users, 1)
        self.item_bias = nn.Embedding(n_items, 1)
        self.offset = nn.Parameter(torch.tensor([mean]))
        for table in (self.user_factors, self.item_factors):
            nn.init.normal_(table.weight, std=0.3)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user, item):
        dot = (self.user_factors(user) * self.item_factors(item)).sum(1)
        return dot + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1) + self.offset


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ratings = make_ratings()
train_frame = ratings.sample(frac=0.85, random_state=0)
test_frame = ratings.drop(train_frame.index)
train_loader = DataLoader(RatingsDataset(train_frame), batch_size=64, shuffle=True)
test_loader = DataLoader(RatingsDataset(test_frame), batch_size=64)
model = MatrixFactorization(60, 45, train_frame.rating.mean()).to(device)
sparse_params = [model.user_factors.weight, model.item_factors.weight]
dense_params = [model.user_bias.weight, model.item_bias.weight, model.offset]
optimizers = [torch.optim.SparseAdam(sparse_params, lr=3e-2), torch.optim.SGD(dense_params, lr=0.3)]
loss_fn = nn.MSELoss()

for epoch in range(5):
    model.train()
    total = 0.0
    for step, (user, item, rating) in enumerate(train_loader):
        prediction = model(user.to(device), item.to(device))
        loss = loss_fn(prediction, rating.to(device))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        total += loss.item() * len(rating)
        if step == 0:
            touched = model.user_factors.weight.grad.coalesce().indices().numel()
            print(f"epoch {epoch}: first loss {loss.item():.4f}, {touched} users in the batch of {len(user)}")
    model.eval()
    with torch.no_grad():
        error = sum(((model(u.to(device), i.to(device)).cpu() - r) ** 2).sum().item() for u, i, r in test_loader)
    print(
        f"epoch {epoch}: train RMSE {(total / len(train_frame)) ** 0.5:.4f}, test RMSE {(error / len(test_frame)) ** 0.5:.4f}"
    )

with torch.no_grad():
    scores = model.user_factors.weight @ model.item_factors.weight.t() + model.item_bias.weight.t()
    best = scores[:3].topk(3).indices.tolist()
print("recommended:", best)
torch.save(model.state_dict(), "factors.pt")
