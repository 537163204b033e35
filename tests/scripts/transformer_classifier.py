"""Classification of sequences with a Transformer encoder: batches padded to their longest sequence, masks of padding."""

import argparse
import math
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

PAD = 0
VOCAB = 40


class BracketDataset(Dataset):
    """Sequences of 4 to 24 tokens; the class is the kind of token that occurs most often."""

    def __init__(self, size, seed):
        rng = random.Random(seed)
        self.samples = []
        for _ in range(size):
            length = rng.randint(4, 24)
            label = rng.randrange(3)
            weights = [3 if k == label else 1 for k in range(3)]
            kinds = rng.choices(range(3), weights, k=length)
            self.samples.append(([1 + kind * 13 + rng.randrange(13) for kind in kinds], label))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def collate_batch(batch):
    texts = [torch.tensor(tokens, dtype=torch.long) for tokens, _ in batch]
    labels = torch.tensor([label for _, label in batch], dtype=torch.long)
    return pad_sequence(texts, batch_first=True, padding_value=PAD), labels


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=64):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)])


class TransformerClassifier(nn.Module):
    def __init__(self, vocab_size, num_class, d_model=48, nhead=4, num_layers=2, dropout=0.1):
        super().__init__()
        self.d_model = d_model
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=PAD)
        self.pos_encoder = PositionalEncoding(d_model, dropout)
        layer = nn.TransformerEncoderLayer(d_model, nhead, 4 * d_model, dropout, batch_first=True, norm_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(d_model, num_class)

    def forward(self, src):
        mask = src == PAD
        x = self.pos_encoder(self.embedding(src) * math.sqrt(self.d_model))
        x = self.transformer_encoder(x, src_key_padding_mask=mask)
        x = x.masked_fill(mask.unsqueeze(-1), 0).sum(dim=1) / (~mask).sum(dim=1, keepdim=True)
        return self.classifier(x)


def train(model, loader, criterion, optimizer, scheduler, device, epoch):
    model.train()
    total_loss, total_acc, total_count = 0, 0, 0
    for batch_idx, (text, label) in enumerate(loader):
        text, label = text.to(device), label.to(device)
        optimizer.zero_grad()
        predicted = model(text)
        loss = criterion(predicted, label)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total_loss += loss.item() * label.size(0)
        total_acc += (predicted.argmax(1) == label).sum().item()
        total_count += label.size(0)
        if (batch_idx + 1) % 4 == 0:
            print(
                f"| epoch {epoch} | {batch_idx + 1:3d}/{len(loader)} batches | width {text.size(1)} "
                f"| lr {scheduler.get_last_lr()[0]:.5f} | accuracy {total_acc / total_count:.3f}"
            )
    return total_loss / total_count


@torch.no_grad()
def evaluate(model, loader, criterion, device):
    model.eval()
    loss, correct, count = 0, 0, 0
    for text, label in loader:
        text, label = text.to(device), label.to(device)
        predicted = model(text)
        loss += criterion(predicted, label).item() * len(label)
        correct += (predicted.argmax(1) == label).sum().item()
        count += len(label)
    return loss / count, correct / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_loader = DataLoader(
        BracketDataset(275, 0), batch_size=args.batch_size, shuffle=True, collate_fn=collate_batch
    )
    test_loader = DataLoader(BracketDataset(90, 1), batch_size=64, collate_fn=collate_batch)
    model = TransformerClassifier(VOCAB, 3).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = OneCycleLR(optimizer, args.lr, epochs=args.epochs, steps_per_epoch=len(train_loader))
    for epoch in range(1, args.epochs + 1):
        train_loss = train(model, train_loader, criterion, optimizer, scheduler, device, epoch)
        test_loss, accuracy = evaluate(model, test_loader, criterion, device)
        print("-" * 59)
        print(f"| end of epoch {epoch} | train {train_loss:.4f} | test {test_loss:.4f} | accuracy {accuracy:.3f}")
        print("-" * 59)


if __name__ == "__main__":
    main()
