"""Convolutional sentence classifier: filters of several widths, one kind for each, maximum over time, weight norms."""

import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(10)
np.random.seed(10)
torch.manual_seed(10)

POSITIVE = ["great", "moving", "funny", "brilliant", "warm"]
NEGATIVE = ["dull", "slow", "awful", "flat", "noisy"]
FILLER = ["film", "the", "a", "story", "with", "actors", "and", "of", "scene", "music", "it", "is"]


def write_reviews(path, count):
    with open(path, "w", encoding="utf-8") as f:
        for _ in range(count):
            label = random.randint(0, 1)
            words = random.choices(FILLER, k=random.randint(5, 14))
            position = random.randrange(len(words))
            # "not" before a word turns the label round.
            negated = random.random() < 0.3
            word = random.choice(POSITIVE if label != negated else NEGATIVE)
            words[position:position] = ["not", word] if negated else [word]
            f.write(f"{label}\t{' '.join(words)}\n")


def read_reviews(path):
    labels, texts = [], []
    with open(path, encoding="utf-8") as f:
        for line in f:
            label, text = line.rstrip("\n").split("\t")
            labels.append(int(label))
            texts.append(text.split())
    return labels, texts


class CNNText(nn.Module):
    def __init__(self, vocab_size, embed_dim=32, class_num=2, kernel_num=16, kernel_sizes=(2, 3, 4), dropout=0.3):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, embed_dim)
        self.convs = nn.ModuleList([nn.Conv2d(1, kernel_num, (K, embed_dim)) for K in kernel_sizes])
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(len(kernel_sizes) * kernel_num, class_num)

    def forward(self, x):
        x = self.embed(x).unsqueeze(1)
        x = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        x = [F.max_pool1d(i, i.size(2)).squeeze(2) for i in x]
        return self.fc1(self.dropout(torch.cat(x, 1)))


def main():
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    os.makedirs("rt-data", exist_ok=True)
    write_reviews("rt-data/train.tsv", 420)
    write_reviews("rt-data/dev.tsv", 90)
    train_labels, train_texts = read_reviews("rt-data/train.tsv")
    dev_labels, dev_texts = read_reviews("rt-data/dev.tsv")
    vocab = {"<pad>": 0, "<unk>": 1}
    for text in train_texts:
        for word in text:
            vocab.setdefault(word, len(vocab))

    def encode(texts):
        width = max(5, *(len(text) for text in texts))
        return torch.LongTensor([[vocab.get(w, 1) for w in text] + [0] * (width - len(text)) for text in texts])

    def get_batches(labels, texts, batch_size, shuffle):
        order = np.random.permutation(len(labels)) if shuffle else np.arange(len(labels))
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            yield encode([texts[i] for i in rows]).to(device), torch.LongTensor([labels[i] for i in rows]).to(device)

    model = CNNText(len(vocab)).to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0, rho=0.95)
    steps, best_acc, last_step = 0, 0, 0
    for epoch in range(1, 4):
        for feature, target in get_batches(train_labels, train_texts, 50, True):
            model.train()
            optimizer.zero_grad()
            logit = model(feature)
            loss = F.cross_entropy(logit, target)
            loss.backward()
            optimizer.step()
            # The rows of the last layer are kept within a ball.
            with torch.no_grad():
                norms = model.fc1.weight.norm(dim=1, keepdim=True)
                model.fc1.weight.mul_(norms.clamp(max=3.0) / norms)
            steps += 1
            if steps % 4 == 0:
                corrects = (torch.max(logit, 1)[1].view(target.size()) == target).sum()
                accuracy = 100.0 * corrects / feature.shape[0]
                print(f"Batch[{steps}] - loss: {loss.item():.6f}  acc: {accuracy:.4f}%({corrects}/{feature.shape[0]})")
            if steps % 9 == 0:
                model.eval()
                corrects, avg_loss = 0, 0
                with torch.no_grad():
                    for feature, target in get_batches(dev_labels, dev_texts, 40, False):
                        logit = model(feature)
                        avg_loss += F.cross_entropy(logit, target, reduction="sum").item()
                        corrects += (logit.argmax(1) == target).sum().item()
                dev_acc = 100.0 * corrects / len(dev_labels)
                print(f"\nEvaluation - loss: {avg_loss / len(dev_labels):.6f}  acc: {dev_acc:.4f}%\n")
                if dev_acc > best_acc:
                    best_acc, last_step = dev_acc, steps
                    torch.save(model.state_dict(), f"rt-data/best_steps_{steps}.pt")
    print(f"best accuracy {best_acc:.4f}% at step {last_step}; files {sorted(os.listdir('rt-data'))}")


if __name__ == "__main__":
    main()
