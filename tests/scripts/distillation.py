"""Knowledge distillation: a teacher is trained first, then frozen; a student learns from its soft labels."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    teacher_epochs: int = 3
    student_epochs: int = 2
    batch_size: int = 64
    temperature: float = 3.0
    soft_target_loss_weight: float = 0.75
    ce_loss_weight: float = 0.25
    seed: int = 42


class DeepNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 24, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 24, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(24, 32, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, num_classes))

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


class LightNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 8, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, num_classes))

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


def train(model, train_loader, epochs, learning_rate, device):
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(train_loader):.4f}")


def train_knowledge_distillation(teacher, student, train_loader, learning_rate, config, device):
    ce_loss = nn.CrossEntropyLoss()
    optimizer = optim.Adam(student.parameters(), lr=learning_rate)
    T = config.temperature
    teacher.eval()
    student.train()
    for epoch in range(config.student_epochs):
        running_loss = 0.0
        for step, (inputs, labels) in enumerate(train_loader):
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)

            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            soft_targets_loss = (
                torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (T**2)
            )
            label_loss = ce_loss(student_logits, labels)
            loss = config.soft_target_loss_weight * soft_targets_loss + config.ce_loss_weight * label_loss
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            if step % 3 == 0:
                print(f"  step {step}: soft {soft_targets_loss.item():.4f} hard {label_loss.item():.4f}")
        print(f"Epoch {epoch + 1}/{config.student_epochs}, Loss: {running_loss / len(train_loader):.4f}")


def test(model, test_loader, device):
    model.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            _, predicted = torch.max(model(inputs).data, 1)
            total += labels.size(0)
            correct += (predicted == labels).sum().item()
    accuracy = 100 * correct / total
    print(f"Test Accuracy: {accuracy:.2f}%")
    return accuracy


def main():
    config = Config()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"Using {device} device")
    digits = load_digits()
    x_train, x_test, y_train, y_test = train_test_split(
        digits.images, digits.target, train_size=430, test_size=200, random_state=0, stratify=digits.target
    )
    train_set = TensorDataset(torch.Tensor(x_train)[:, None] / 16, torch.tensor(y_train))
    test_set = TensorDataset(torch.Tensor(x_test)[:, None] / 16, torch.tensor(y_test))
    train_loader = DataLoader(train_set, batch_size=config.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=128, shuffle=False)

    torch.manual_seed(config.seed)
    teacher = DeepNN().to(device)
    print(f"DeepNN parameters: {sum(p.numel() for p in teacher.parameters()):,}")
    train(teacher, train_loader, epochs=config.teacher_epochs, learning_rate=0.003, device=device)
    test_accuracy_deep = test(teacher, test_loader, device)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)

    torch.manual_seed(config.seed)
    student = LightNN().to(device)
    print(f"LightNN parameters: {sum(p.numel() for p in student.parameters()):,}")
    train_knowledge_distillation(teacher, student, train_loader, learning_rate=0.01, config=config, device=device)
    test_accuracy_light = test(student, test_loader, device)
    print(f"Teacher accuracy: {test_accuracy_deep:.2f}%")
    print(f"Student accuracy with distillation: {test_accuracy_light:.2f}%")


if __name__ == "__main__":
    main()
