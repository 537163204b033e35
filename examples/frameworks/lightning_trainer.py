"""Training with the trainer of Lightning."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1400, 397])


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, number):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def test_step(self, batch, number):
        inputs, targets = batch
        self.log(
            "loss", nn.functional.cross_entropy(self.net(inputs), targets), batch_size=len(targets)
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=1, **quiet)
model = Digits()
trainer.fit(model, DataLoader(train, batch_size=64))
values = trainer.test(model, DataLoader(test, batch_size=64), verbose=False)
trainer.print(f"loss {values[0]['loss']:.4f}")
