"""Momentum contrast: a queue of keys, a momentum encoder and a monitor of nearest neighbours."""

import argparse
import copy
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


class Textures(Dataset):
    """Images [3, 16, 16] of four textures; with `pair`, two random views of each."""

    def __init__(self, count, seed, transform, pair):
        generator = torch.Generator().manual_seed(seed)
        bases = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(77))
        self.targets = torch.randint(0, 4, (count,), generator=generator)
        self.data = (bases[self.targets] + 0.25 * torch.randn(count, 3, 16, 16, generator=generator)).clamp(0, 1)
        self.transform = transform
        self.pair = pair

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        img = self.data[index]
        if self.pair:
            return self.transform(img), self.transform(img)
        return self.transform(img), self.targets[index]


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, dim),
        )

    def forward(self, x):
        return self.net(x)


class ModelMoCo(nn.Module):
    def __init__(self, dim=16, K=256, m=0.99, T=0.1):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = Encoder(dim)
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for param_k in self.encoder_k.parameters():
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % batch_size == 0
        self.queue[:, ptr : ptr + batch_size] = keys.t()
        self.queue_ptr[0] = (ptr + batch_size) % self.K

    @torch.no_grad()
    def _batch_shuffle(self, x):
        idx_shuffle = torch.randperm(x.shape[0], device=x.device)
        return x[idx_shuffle], torch.argsort(idx_shuffle)

    @torch.no_grad()
    def _batch_unshuffle(self, x, idx_unshuffle):
        return x[idx_unshuffle]

    def forward(self, im_q, im_k):
        with torch.no_grad():
            self._momentum_update_key_encoder()
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            im_k, idx_unshuffle = self._batch_shuffle(im_k)
            k = F.normalize(self.encoder_k(im_k), dim=1)
            k = self._batch_unshuffle(k, idx_unshuffle)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
        loss = nn.functional.cross_entropy(logits, labels)
        self._dequeue_and_enqueue(k)
        return loss


def adjust_learning_rate(optimizer, epoch, args):
    lr = args.lr * 0.5 * (1.0 + math.cos(math.pi * epoch / args.epochs))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train(net, data_loader, train_optimizer, epoch, args):
    net.train()
    adjust_learning_rate(train_optimizer, epoch, args)
    total_loss, total_num = 0.0, 0
    for step, (im_1, im_2) in enumerate(data_loader):
        im_1, im_2 = im_1.to(args.device), im_2.to(args.device)
        loss = net(im_1, im_2)
        train_optimizer.zero_grad()
        loss.backward()
        train_optimizer.step()
        total_num += data_loader.batch_size
        total_loss += loss.item() * data_loader.batch_size
        lr = train_optimizer.param_groups[0]["lr"]
        if step % 2 == 0:
            print(f"Train Epoch: [{epoch}/{args.epochs}], lr: {lr:.6f}, Loss: {total_loss / total_num:.4f}")
    return total_loss / total_num


def test(net, memory_loader, test_loader, args):
    """Accuracy of the weighted vote of the nearest neighbours among the features of the memory."""
    net.eval()
    with torch.no_grad():
        bank = torch.cat([F.normalize(net(data.to(args.device)), dim=1) for data, _ in memory_loader]).t()
        bank_labels = torch.cat([target for _, target in memory_loader])
        correct, total = 0, 0
        for data, target in test_loader:
            feature = F.normalize(net(data.to(args.device)), dim=1)
            sim_weight, sim_indices = (feature @ bank).topk(k=args.knn_k, dim=-1)
            votes = F.one_hot(bank_labels[sim_indices], 4) * (sim_weight / args.knn_t).exp().unsqueeze(-1)
            correct += (votes.sum(1).argmax(1) == target).sum().item()
            total += len(target)
    print(f"Test Epoch: Acc@1: {100.0 * correct / total:.2f}%")
    return 100.0 * correct / total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Momentum contrast")
    parser.add_argument("--lr", default=0.06, type=float)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--moco-k", default=128, type=int)
    parser.add_argument("--knn-k", default=20, type=int)
    parser.add_argument("--knn-t", default=0.1, type=float)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    train_transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(16, scale=(0.6, 1.0), antialias=True),
            transforms.RandomHorizontalFlip(p=0.5),
            transforms.RandomGrayscale(p=0.2),
            transforms.Normalize([0.5, 0.5, 0.5], [0.25, 0.25, 0.25]),
        ]
    )
    test_transform = transforms.Normalize([0.5, 0.5, 0.5], [0.25, 0.25, 0.25])
    train_loader = DataLoader(
        Textures(210, 0, train_transform, pair=True), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    memory_loader = DataLoader(Textures(210, 0, test_transform, pair=False), batch_size=64)
    test_loader = DataLoader(Textures(70, 1, test_transform, pair=False), batch_size=64)

    model = ModelMoCo(K=args.moco_k).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, weight_decay=5e-4, momentum=0.9)
    results = {"train_loss": [], "test_acc@1": []}
    for epoch in range(args.epochs):
        results["train_loss"].append(train(model, train_loader, optimizer, epoch, args))
        results["test_acc@1"].append(test(model.encoder_q, memory_loader, test_loader, args))
        with open("moco_log.json", "w") as fid:
            json.dump(results, fid, indent=2)
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "moco_last.pth")
