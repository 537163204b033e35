"""Semi-supervised classification of nodes: graph convolutions on one graph, full-batch training, masks of nodes."""

import argparse
import math

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.parameter import Parameter

parser = argparse.ArgumentParser()
parser.add_argument("--fastmode", action="store_true", help="Validate with dropout.")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--weight_decay", type=float, default=5e-4)
parser.add_argument("--hidden", type=int, default=16)
parser.add_argument("--dropout", type=float, default=0.5)
args = parser.parse_args()
np.random.seed(args.seed)
torch.manual_seed(args.seed)


def normalize(mx):
    """Row-normalize a sparse matrix."""
    rowsum = np.array(mx.sum(1)).flatten()
    r_inv = np.where(rowsum > 0, 1 / np.maximum(rowsum, 1e-12), 0)
    return sp.diags(r_inv).dot(mx)


def sparse_mx_to_torch_sparse_tensor(sparse_mx):
    sparse_mx = sparse_mx.tocoo()
    indices = torch.from_numpy(np.vstack((sparse_mx.row, sparse_mx.col)).astype(np.int64))
    return torch.sparse_coo_tensor(
        indices, torch.Tensor(sparse_mx.data), torch.Size(sparse_mx.shape), check_invariants=True
    )


def load_data(nodes=350, classes=4, words=60):
    """Make communities: edges mostly inside, words that depend on the community."""
    labels = np.random.randint(classes, size=nodes)
    same = labels[:, None] == labels[None, :]
    edges = np.triu(np.random.rand(nodes, nodes) < np.where(same, 0.03, 0.004), 1)
    adj = sp.coo_matrix(edges + edges.T, dtype=np.float64)
    topics = np.random.rand(classes, words) ** 4 * 0.3
    features = sp.csr_matrix((np.random.rand(nodes, words) < topics[labels]).astype(np.float64))
    adj = normalize(adj + sp.eye(nodes))
    features = torch.Tensor(np.array(normalize(features).todense()))
    idx_train, idx_val, idx_test = range(60), range(60, 160), range(160, nodes)
    indexes = (torch.LongTensor(list(idx)) for idx in (idx_train, idx_val, idx_test))
    return sparse_mx_to_torch_sparse_tensor(adj), features, torch.LongTensor(labels), *indexes


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = Parameter(torch.empty(in_features, out_features))
        self.bias = Parameter(torch.empty(out_features))
        stdv = 1.0 / math.sqrt(out_features)
        self.weight.data.uniform_(-stdv, stdv)
        self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        return torch.spmm(adj, support) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


def accuracy(output, labels):
    preds = output.max(1)[1].type_as(labels)
    return preds.eq(labels).double().sum() / len(labels)


adj, features, labels, idx_train, idx_val, idx_test = load_data()
model = GCN(nfeat=features.shape[1], nhid=args.hidden, nclass=labels.max().item() + 1, dropout=args.dropout)
optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
if torch.cuda.is_available():
    model.cuda()
    features, adj, labels = features.cuda(), adj.cuda(), labels.cuda()
    idx_train, idx_val, idx_test = idx_train.cuda(), idx_val.cuda(), idx_test.cuda()


def train(epoch):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    acc_train = accuracy(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()
    if not args.fastmode:
        # Evaluate in a separate run, without dropout.
        model.eval()
        with torch.no_grad():
            output = model(features, adj)
    loss_val = F.nll_loss(output[idx_val], labels[idx_val])
    acc_val = accuracy(output[idx_val], labels[idx_val])
    if epoch % 5 == 4:
        print(
            f"Epoch: {epoch + 1:04d} loss_train: {loss_train.item():.4f} acc_train: {acc_train.item():.4f} "
            f"loss_val: {loss_val.item():.4f} acc_val: {acc_val.item():.4f}"
        )


def test():
    model.eval()
    output = model(features, adj)
    loss_test = F.nll_loss(output[idx_test], labels[idx_test])
    acc_test = accuracy(output[idx_test], labels[idx_test])
    print(f"Test set results: loss= {loss_test.item():.4f} accuracy= {acc_test.item():.4f}")


for epoch in range(args.epochs):
    train(epoch)
print("Optimization Finished!")
test()
