"""A siamese network with a contrastive loss on pairs of digits."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import optim
from torch.utils.data import DataLoader, Dataset

random.seed(11)
torch.manual_seed(11)
np.random.seed(11)


class SiameseNetworkDataset(Dataset):
    """Pairs of images; half of them are of the same class. The second image is drawn when the pair is read."""

    def __init__(self, start, stop):
        digits = load_digits()
        self.images = torch.Tensor(digits.images[start:stop]).unsqueeze(1) / 16
        self.labels = digits.target[start:stop]

    def __getitem__(self, index):
        img0, label0 = self.images[index], self.labels[index]
        should_get_same_class = random.randint(0, 1)
        while True:
            other = random.randrange(len(self.labels))
            if (self.labels[other] == label0) == bool(should_get_same_class):
                break
        return img0, self.images[other], torch.Tensor([int(self.labels[other] != label0)])

    def __len__(self):
        return len(self.labels)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn1 = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(1, 4, kernel_size=3),
            nn.ReLU(inplace=True),
            nn.BatchNorm2d(4),
            nn.ReflectionPad2d(1),
            nn.Conv2d(4, 8, kernel_size=3),
            nn.ReLU(inplace=True),
            nn.BatchNorm2d(8),
        )
        self.fc1 = nn.Sequential(nn.Linear(8 * 64, 64), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(64, 5))

    def forward_once(self, x):
        output = self.cnn1(x)
        output = output.view(output.size()[0], -1)
        return self.fc1(output)

    def forward(self, input1, input2):
        output1 = self.forward_once(input1)
        output2 = self.forward_once(input2)
        return output1, output2


class ContrastiveLoss(torch.nn.Module):
    """Squared distances of equal pairs, and squared remainders to the margin of unequal pairs."""

    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def forward(self, output1, output2, label):
        euclidean_distance = F.pairwise_distance(output1, output2, keepdim=True)
        return torch.mean(
            (1 - label) * torch.pow(euclidean_distance, 2)
            + label * torch.pow(torch.clamp(self.margin - euclidean_distance, min=0.0), 2)
        )


train_dataloader = DataLoader(SiameseNetworkDataset(0, 250), shuffle=True, num_workers=0, batch_size=40)
test_dataloader = DataLoader(SiameseNetworkDataset(300, 420), num_workers=0, batch_size=50)
net = SiameseNetwork()
criterion = ContrastiveLoss()
optimizer = optim.Adam(net.parameters(), lr=0.001)
counter = []
loss_history = []
iteration_number = 0

for epoch in range(4):
    for i, data in enumerate(train_dataloader, 0):
        img0, img1, label = data
        optimizer.zero_grad()
        output1, output2 = net(img0, img1)
        loss_contrastive = criterion(output1, output2, label)
        loss_contrastive.backward()
        optimizer.step()
        if i % 3 == 0:
            print(f"Epoch number {epoch}\n Current loss {loss_contrastive.item():.5f}\n")
            iteration_number += 3
            counter.append(iteration_number)
            loss_history.append(loss_contrastive.item())

net.eval()
distances, labels = [], []
with torch.no_grad():
    for img0, img1, label in test_dataloader:
        output1, output2 = net(img0, img1)
        distances.append(F.pairwise_distance(output1, output2))
        labels.append(label.squeeze(1))
distances, labels = torch.cat(distances), torch.cat(labels)
print(f"mean distance of equal pairs {distances[labels == 0].mean():.4f}, unequal {distances[labels == 1].mean():.4f}")
accuracies = [((distances > t) == (labels == 1)).double().mean().item() for t in torch.linspace(0.2, 3, 15).tolist()]
print(f"best accuracy {max(accuracies):.3f} at threshold {torch.linspace(0.2, 3, 15)[int(np.argmax(accuracies))]:.2f}")
np.savetxt("siamese_loss.txt", np.stack([counter, loss_history], axis=1), fmt="%.6f")
