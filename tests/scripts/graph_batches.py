"""Regression of properties of small graphs: batches of edge lists, messages summed by `index_add_`, pooling by scatter."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

random.seed(12)
torch.manual_seed(12)


class Batch:
    """Several graphs as one disconnected graph."""

    def __init__(self, x, edge_index, edge_attr, batch, y, num_graphs):
        self.x, self.edge_index, self.edge_attr = x, edge_index, edge_attr
        self.batch, self.y, self.num_graphs = batch, y, num_graphs

    def to(self, device):
        for name, value in vars(self).items():
            if torch.is_tensor(value):
                setattr(self, name, value.to(device))
        return self


class MoleculeDataset(Dataset):
    """Random trees with a few rings; the target counts bonds between unlike atoms."""

    def __init__(self, count):
        self.graphs = []
        for _ in range(count):
            nodes = random.randint(4, 14)
            atoms = [random.randrange(4) for _ in range(nodes)]
            bonds = {(random.randrange(i), i) for i in range(1, nodes)}
            for _ in range(random.randint(0, 2)):
                bonds.add(tuple(sorted(random.sample(range(nodes), 2))))
            bonds = sorted(bonds)
            kinds = [random.randrange(2) for _ in bonds]
            target = sum((1 + kind) * (atoms[a] != atoms[b]) for (a, b), kind in zip(bonds, kinds)) / 5
            self.graphs.append((atoms, bonds, kinds, target))

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, i):
        atoms, bonds, kinds, target = self.graphs[i]
        x = torch.tensor(atoms)
        edge_index = torch.tensor(bonds).t()
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        return x, edge_index, torch.tensor(kinds * 2), torch.tensor([target])


def collate(graphs):
    xs, edges, attrs, batch, ys = [], [], [], [], []
    offset = 0
    for i, (x, edge_index, edge_attr, y) in enumerate(graphs):
        xs.append(x)
        edges.append(edge_index + offset)
        attrs.append(edge_attr)
        batch.append(torch.full((len(x),), i))
        ys.append(y)
        offset += len(x)
    return Batch(torch.cat(xs), torch.cat(edges, dim=1), torch.cat(attrs), torch.cat(batch), torch.cat(ys), len(graphs))


class GINEConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.edge_encoder = nn.Embedding(2, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.BatchNorm1d(2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, edge_index, edge_attr):
        source, target = edge_index
        message = F.relu(x[source] + self.edge_encoder(edge_attr))
        aggregated = torch.zeros_like(x).index_add_(0, target, message)
        return self.mlp((1 + self.eps) * x + aggregated)


def global_mean_pool(x, batch, size):
    total = x.new_zeros(size, x.size(1)).scatter_add_(0, batch[:, None].expand_as(x), x)
    count = torch.bincount(batch, minlength=size).clamp(min=1)
    return total / count[:, None]


class GIN(nn.Module):
    def __init__(self, dim=32, num_layers=3):
        super().__init__()
        self.embedding = nn.Embedding(4, dim)
        self.convs = nn.ModuleList(GINEConv(dim) for _ in range(num_layers))
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(0.1), nn.Linear(dim, 1))

    def forward(self, data):
        x = self.embedding(data.x)
        for conv in self.convs:
            x = x + F.relu(conv(x, data.edge_index, data.edge_attr))
        return self.head(global_mean_pool(x, data.batch, data.num_graphs)).squeeze(-1)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_dataset, test_dataset = MoleculeDataset(270), MoleculeDataset(80)
train_loader = DataLoader(train_dataset, batch_size=32, shuffle=True, collate_fn=collate)
test_loader = DataLoader(test_dataset, batch_size=64, collate_fn=collate)
model = GIN().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.7, patience=1, min_lr=1e-5)


def train():
    model.train()
    loss_all = 0
    for step, data in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        loss = F.mse_loss(model(data), data.y)
        loss.backward()
        loss_all += loss.item() * data.num_graphs
        optimizer.step()
        if step % 4 == 0:
            print(
                f"  graphs {data.num_graphs}, nodes {len(data.x)}, edges {data.edge_index.size(1)}: {loss.item():.4f}"
            )
    return loss_all / len(train_dataset)


@torch.no_grad()
def test(loader):
    model.eval()
    error = 0
    for data in loader:
        data = data.to(device)
        error += (model(data) - data.y).abs().sum().item()
    return error / len(loader.dataset)


for epoch in range(1, 4):
    lr = scheduler.optimizer.param_groups[0]["lr"]
    loss = train()
    test_error = test(test_loader)
    scheduler.step(test_error)
    print(f"Epoch: {epoch:03d}, LR: {lr:.5f}, Loss: {loss:.5f}, Test MAE: {test_error:.5f}")
