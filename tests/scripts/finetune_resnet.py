"""Fine-tuning of torchvision's ResNet-18: early layers are frozen, the best weights are restored at the end."""

import os
from tempfile import TemporaryDirectory

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler
from torchvision import datasets, models, transforms

torch.manual_seed(2)

data_transforms = {
    "train": transforms.Compose(
        [
            transforms.RandomResizedCrop(32),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    ),
    "val": transforms.Compose(
        [
            transforms.Resize(36),
            transforms.CenterCrop(32),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    ),
}
image_datasets = {
    "train": datasets.FakeData(76, (3, 40, 40), 2, data_transforms["train"]),
    "val": datasets.FakeData(38, (3, 40, 40), 2, data_transforms["val"], random_offset=100),
}
dataloaders = {
    x: torch.utils.data.DataLoader(image_datasets[x], batch_size=16, shuffle=x == "train", num_workers=0)
    for x in ["train", "val"]
}
dataset_sizes = {x: len(image_datasets[x]) for x in ["train", "val"]}
class_names = ["ants", "bees"]
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def train_model(model, criterion, optimizer, scheduler, num_epochs=3):
    with TemporaryDirectory(dir=".") as tempdir:
        best_model_params_path = os.path.join(tempdir, "best_model_params.pt")
        torch.save(model.state_dict(), best_model_params_path)
        best_acc = 0.0

        for epoch in range(num_epochs):
            print(f"Epoch {epoch}/{num_epochs - 1}")
            print("-" * 10)

            for phase in ["train", "val"]:
                if phase == "train":
                    model.train()
                else:
                    model.eval()

                running_loss = 0.0
                running_corrects = 0
                for inputs, labels in dataloaders[phase]:
                    inputs = inputs.to(device)
                    labels = labels.to(device)
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(phase == "train"):
                        outputs = model(inputs)
                        _, preds = torch.max(outputs, 1)
                        loss = criterion(outputs, labels)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
                    running_loss += loss.item() * inputs.size(0)
                    running_corrects += torch.sum(preds == labels.data)
                if phase == "train":
                    scheduler.step()

                epoch_loss = running_loss / dataset_sizes[phase]
                epoch_acc = running_corrects / dataset_sizes[phase]
                print(f"{phase} Loss: {epoch_loss:.4f} Acc: {epoch_acc:.4f}")
                if phase == "val" and epoch_acc > best_acc:
                    best_acc = epoch_acc
                    torch.save(model.state_dict(), best_model_params_path)
            print()

        print("Training complete")
        print(f"Best val Acc: {best_acc:4f}")
        model.load_state_dict(torch.load(best_model_params_path, weights_only=True))
    return model


model_ft = models.resnet18(weights=None)
for name, param in model_ft.named_parameters():
    param.requires_grad = name.startswith("layer4")
num_ftrs = model_ft.fc.in_features
model_ft.fc = nn.Linear(num_ftrs, len(class_names))
model_ft = model_ft.to(device)

criterion = nn.CrossEntropyLoss()
trainable = [p for p in model_ft.parameters() if p.requires_grad]
print(f"{sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model_ft.parameters())} parameters are trained")
optimizer_ft = optim.SGD(trainable, lr=0.005, momentum=0.9)
exp_lr_scheduler = lr_scheduler.StepLR(optimizer_ft, step_size=2, gamma=0.1)
model_ft = train_model(model_ft, criterion, optimizer_ft, exp_lr_scheduler, num_epochs=3)

model_ft.eval()
with torch.no_grad():
    inputs, classes = next(iter(dataloaders["val"]))
    outputs = model_ft(inputs.to(device)).softmax(dim=1)
for row, label in zip(outputs[:4].tolist(), classes[:4].tolist()):
    print(f"actual: {class_names[label]}, predicted probabilities: {row[0]:.3f} {row[1]:.3f}")
