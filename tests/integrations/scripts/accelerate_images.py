"""Image classification in the form of Accelerate's examples: augmentation, a frozen trunk, a schedule."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import RandomResizedCrop
from tqdm.auto import tqdm

EPOCHS, BATCH = 2, 32


class Digits(Dataset):
    def __init__(self, images, labels, transform=None):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return {"image": image if self.transform is None else self.transform(image), "label": self.labels[index]}


def main():
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="logs")
    accelerator.init_trackers("digits", {"batch": BATCH})
    set_seed(42)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images, order = images.float().view(-1, 1, 8, 8), torch.randperm(len(labels))
    train, test = order[:1400], order[1400:]
    crop = RandomResizedCrop(8, scale=(0.7, 1.0), antialias=True)
    train_loader = DataLoader(Digits(images[train], labels[train], crop), batch_size=BATCH, shuffle=True, num_workers=1)
    test_loader = DataLoader(Digits(images[test], labels[test]), batch_size=BATCH)

    trunk = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(trunk, nn.Linear(16 * 64, 10)).to(accelerator.device)
    for parameter in trunk.parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 / 25)
    scheduler = OneCycleLR(optimizer, max_lr=0.01, epochs=EPOCHS, steps_per_epoch=len(train_loader))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    progress = tqdm(total=EPOCHS * len(train_loader), disable=not accelerator.is_local_main_process)
    for epoch in range(EPOCHS):
        model.train()
        for batch in train_loader:
            outputs = model((batch["image"] - 4.9) / 6.0)
            loss = nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.update(1)

        model.eval()
        correct = count = 0
        for batch in test_loader:
            with torch.no_grad():
                outputs = model((batch["image"] - 4.9) / 6.0)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            count += len(references)
            correct += int((predictions == references).sum())
        accelerator.log({"accuracy": correct / count}, step=epoch)
        accelerator.print(f"epoch {epoch}: {correct} of {count}")
        accelerator.save_state(f"epoch_{epoch}")
    progress.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
