"""Accelerate's loop: accumulation, clipping, a schedule, metrics of gathered predictions, and the unwrapped model saved."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Net(nn.Module):
    def __init__(self, channels=24, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(ResidualBlock(channels), nn.MaxPool2d(2), ResidualBlock(channels))
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(5)
    means = torch.randn(4, 3, 1, 1, generator=generator)

    def split(count):
        labels = torch.randint(0, 4, (count,), generator=generator)
        images = means[labels] + 2 * torch.randn(count, 3, 12, 12, generator=generator)
        return TensorDataset(images, labels)

    train = DataLoader(split(200), batch_size=batch_size, shuffle=True, drop_last=True)
    evaluation = DataLoader(split(70), batch_size=32)
    return train, evaluation


def evaluate(accelerator, model, loader):
    model.eval()
    correct = 0
    seen = 0
    total = 0.0
    for images, labels in loader:
        with torch.no_grad():
            logits = model(images)
        predictions, references = accelerator.gather_for_metrics((logits.argmax(dim=-1), labels))
        losses = accelerator.gather_for_metrics(F.cross_entropy(logits, labels, reduction="none"))
        correct += (predictions == references).sum().item()
        seen += references.shape[0]
        total += losses.sum().item()
    model.train()
    return correct / seen, total / seen, seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(11)
    train, evaluation = get_dataloaders(args.batch_size)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps = args.epochs * len(train) // args.gradient_accumulation_steps
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)

    accelerator.print(f"processes {accelerator.num_processes}, batches {len(train)}, device {accelerator.device.type}")
    step = 0
    for epoch in range(args.epochs):
        running = 0.0
        for images, labels in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.05)
                accelerator.backward(loss)
                running += loss.item()
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    step += 1
                    rate = scheduler.get_last_lr()[0]
                    accelerator.print(f"step {step}: loss {loss.item():.4f} norm {norm.item():.4f} rate {rate:.6f}")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accuracy, mean, seen = evaluate(accelerator, model, evaluation)
        accelerator.print(
            f"epoch {epoch}: train {running / len(train):.4f} val {mean:.4f} accuracy {accuracy:.4f} of {seen}"
        )

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    saved = torch.load("model.pt")
    accelerator.print("saved", len(saved), f"{sum(value.abs().sum().item() for value in saved.values()):.3f}")


if __name__ == "__main__":
    main()
