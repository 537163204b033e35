"""Contrastive learning of two views of each image (NT-Xent loss), then a linear classifier on frozen features."""

import argparse
import logging
import os

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import transforms
from tqdm import tqdm

parser = argparse.ArgumentParser(description="Contrastive learning of digits")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=36, type=int)
parser.add_argument("--lr", default=1e-3, type=float)
parser.add_argument("--wd", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("--seed", default=6, type=int)
parser.add_argument("--out_dim", default=16, type=int)
parser.add_argument("--log-every-n-steps", default=3, type=int)
parser.add_argument("--temperature", default=0.2, type=float)
parser.add_argument("--n-views", default=2, type=int)


class ContrastiveLearningViewGenerator:
    """Random views of one image."""

    def __init__(self, base_transform, n_views=2):
        self.base_transform = base_transform
        self.n_views = n_views

    def __call__(self, x):
        return [self.base_transform(x) for i in range(self.n_views)]


class Digits(Dataset):
    def __init__(self, rows, transform):
        digits = load_digits()
        self.images = (digits.images[rows] * 15.9).astype(np.uint8)
        self.labels = digits.target[rows]
        self.transform = transform
        self.to_pil = transforms.ToPILImage()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.to_pil(self.images[index])), int(self.labels[index])


class Encoder(nn.Module):
    def __init__(self, out_dim):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.projection = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, out_dim))

    def forward(self, x):
        return self.projection(self.backbone(x))


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1))
        return [100.0 * correct[:k].sum() / target.size(0) for k in topk]


class SimCLR:
    def __init__(self, model, optimizer, scheduler, args):
        self.args = args
        self.model = model.to(args.device)
        self.optimizer = optimizer
        self.scheduler = scheduler
        os.makedirs("simclr_runs", exist_ok=True)
        logging.basicConfig(filename=os.path.join("simclr_runs", "training.log"), filemode="w", level=logging.DEBUG)
        self.criterion = torch.nn.CrossEntropyLoss().to(args.device)

    def info_nce_loss(self, features):
        rows = features.shape[0] // self.args.n_views
        labels = torch.cat([torch.arange(rows) for i in range(self.args.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).to(self.args.device)
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)

        mask = torch.eye(labels.shape[0], dtype=torch.bool).to(self.args.device)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        labels = torch.zeros(logits.shape[0], dtype=torch.long).to(self.args.device)
        return logits / self.args.temperature, labels

    def train(self, train_loader):
        n_iter = 0
        logging.info(f"Start training for {self.args.epochs} epochs.")
        for epoch_counter in range(self.args.epochs):
            for images, _ in tqdm(train_loader):
                images = torch.cat(images, dim=0).to(self.args.device)
                features = self.model(images)
                logits, labels = self.info_nce_loss(features)
                loss = self.criterion(logits, labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()

                if n_iter % self.args.log_every_n_steps == 0:
                    top1, top5 = accuracy(logits, labels, topk=(1, 5))
                    print(f"step {n_iter}: loss {loss.item():.4f} top1 {top1.item():.2f} top5 {top5.item():.2f}")
                n_iter += 1
            if epoch_counter >= 1:
                self.scheduler.step()
            logging.debug(f"Epoch: {epoch_counter}\tLoss: {loss}\tTop1 accuracy: {top1}")
        torch.save({"state_dict": self.model.state_dict()}, os.path.join("simclr_runs", "checkpoint.pth.tar"))
        return self.model


@torch.no_grad()
def extract(model, loader):
    features, labels = zip(*[(model.backbone(images), labels) for images, labels in loader])
    return torch.cat(features), torch.cat(labels)


def linear_evaluation(model, args):
    model.eval()
    plain = transforms.ToTensor()
    x, y = extract(model, DataLoader(Digits(slice(0, 200), plain), 64))
    x_test, y_test = extract(model, DataLoader(Digits(slice(900, 1000), plain), 64))
    classifier = nn.Linear(x.shape[1], 10)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=0.05)
    for step in range(10):
        loss = F.cross_entropy(classifier(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    acc = accuracy(classifier(x_test), y_test)[0]
    print(f"linear evaluation: loss {loss.item():.4f}, test accuracy {acc.item():.2f}")


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    jitter = transforms.ColorJitter(0.4, 0.4)
    data_transforms = transforms.Compose(
        [
            transforms.RandomResizedCrop(size=12, scale=(0.5, 1.0)),
            transforms.RandomApply([jitter], p=0.8),
            transforms.RandomAffine(10),
            transforms.ToTensor(),
        ]
    )
    dataset = Digits(slice(0, 300), ContrastiveLearningViewGenerator(data_transforms, args.n_views))
    train_loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = Encoder(args.out_dim)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(train_loader), eta_min=0)
    simclr = SimCLR(model, optimizer, scheduler, args)
    linear_evaluation(simclr.train(train_loader), args)


if __name__ == "__main__":
    main()
