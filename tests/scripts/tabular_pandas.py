"""Tabular data with pandas: a CSV file is written and read back, categories are embedded, numbers normalized."""

import os

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def make_csv(path, rows=420):
    rng = np.random.default_rng(11)
    frame = pd.DataFrame(
        {
            "age": rng.integers(18, 70, rows),
            "fare": rng.gamma(2.0, 20.0, rows).round(2),
            "distance": rng.normal(40, 12, rows).round(1),
            "city": rng.choice(["Oslo", "Lima", "Quito", "Turin", "Perth"], rows),
            "plan": rng.choice(["basic", "plus", "gold"], rows, p=[0.6, 0.3, 0.1]),
            "weekday": rng.integers(0, 7, rows),
        }
    )
    score = 0.04 * (frame.age - 40) - 0.02 * frame.fare + (frame.plan == "gold") * 2 + frame.city.isin(["Oslo", "Lima"])
    frame["churn"] = (score + rng.logistic(0, 0.6, rows) > 0).astype(int)
    frame.loc[rng.random(rows) < 0.05, "distance"] = np.nan
    frame.to_csv(path, index=False)


class TabularDataset(Dataset):
    def __init__(self, frame, cat_cols, cont_cols, target):
        self.cats = np.stack([frame[c].cat.codes.values for c in cat_cols], axis=1).astype(np.int64)
        self.conts = torch.Tensor(frame[cont_cols].to_numpy(dtype="float64").tolist())
        self.target = torch.Tensor(frame[target].tolist())

    def __len__(self):
        return len(self.target)

    def __getitem__(self, idx):
        return self.cats[idx], self.conts[idx], self.target[idx]


class TabularModel(nn.Module):
    def __init__(self, embedding_sizes, n_cont, layers=(48, 24), p=0.1):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(categories, size) for categories, size in embedding_sizes])
        n_emb = sum(e.embedding_dim for e in self.embeddings)
        self.emb_drop = nn.Dropout(p)
        self.bn_cont = nn.BatchNorm1d(n_cont)
        sizes = [n_emb + n_cont, *layers]
        blocks = []
        for i, n_out in enumerate(layers):
            blocks += [nn.Linear(sizes[i], n_out), nn.ReLU(inplace=True), nn.BatchNorm1d(n_out), nn.Dropout(p)]
        self.layers = nn.Sequential(*blocks, nn.Linear(sizes[-1], 1))

    def forward(self, x_cat, x_cont):
        x = [e(x_cat[:, i]) for i, e in enumerate(self.embeddings)]
        x = self.emb_drop(torch.cat(x, 1))
        return self.layers(torch.cat([x, self.bn_cont(x_cont)], 1)).squeeze(1)


def auc(scores, labels):
    order = scores.argsort()
    ranks = torch.empty(len(scores)).scatter_(0, order, torch.arange(1, len(scores) + 1, dtype=scores.dtype))
    positive = labels == 1
    n_pos, n_neg = positive.sum(), (~positive).sum()
    return ((ranks[positive].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)).item()


np.random.seed(42)
torch.manual_seed(42)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
os.makedirs("data", exist_ok=True)
make_csv("data/customers.csv")
df = pd.read_csv("data/customers.csv")
print(df.describe().loc[["mean", "std"]].round(3).to_string())
print(df.isna().sum().to_dict())
cat_cols, cont_cols = ["city", "plan", "weekday"], ["age", "fare", "distance"]
for col in cat_cols:
    df[col] = df[col].astype("category")
df[cont_cols] = df[cont_cols].fillna(df[cont_cols].median())
df[cont_cols] = (df[cont_cols] - df[cont_cols].mean()) / df[cont_cols].std()
train_df = df.sample(frac=0.8, random_state=42)
valid_df = df.drop(train_df.index)
embedded_sizes = [(len(df[c].cat.categories), min(50, (len(df[c].cat.categories) + 1) // 2)) for c in cat_cols]
train_dl = DataLoader(TabularDataset(train_df, cat_cols, cont_cols, "churn"), batch_size=50, shuffle=True)
valid_dl = DataLoader(TabularDataset(valid_df, cat_cols, cont_cols, "churn"), batch_size=50)

model = TabularModel(embedded_sizes, len(cont_cols)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
pos_weight = torch.tensor((train_df.churn == 0).sum() / (train_df.churn == 1).sum())
history = []
for epoch in range(4):
    model.train()
    total, sum_loss = 0, 0
    for x_cat, x_cont, target in train_dl:
        x_cat, x_cont, target = x_cat.to(device), x_cont.to(device), target.to(device)
        output = model(x_cat, x_cont)
        loss = F.binary_cross_entropy_with_logits(output, target, pos_weight=pos_weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += len(target)
        sum_loss += len(target) * loss.item()
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for x_cat, x_cont, target in valid_dl:
            outputs.append(model(x_cat.to(device), x_cont.to(device)).cpu())
            targets.append(target)
    outputs, targets = torch.cat(outputs), torch.cat(targets)
    accuracy = ((outputs > 0) == (targets == 1)).sum().item() / len(targets)
    history.append({"epoch": epoch, "train_loss": sum_loss / total, "accuracy": accuracy, "auc": auc(outputs, targets)})
    print(
        f"epoch {epoch}: train loss {sum_loss / total:.4f}, valid accuracy {accuracy:.4f}, auc {history[-1]['auc']:.4f}"
    )

pd.DataFrame(history).to_csv("history.csv", index=False)
print(pd.read_csv("history.csv").round(3).to_string(index=False))
