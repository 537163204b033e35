"""Manual optimization with two optimizers, a sampler of the script, and predictions of each rank."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from parts import dataset, model
from torch.utils.data import DataLoader, DistributedSampler


class Adversarial(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = model(), model()

    def training_step(self, batch, _):
        inputs, targets = batch
        for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(F.cross_entropy(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def predict_step(self, batch, _):
        return self.first(batch[0]).argmax(1)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters()) for net in (self.first, self.second)]

    def train_dataloader(self):
        data = dataset()
        sampler = DistributedSampler(data, num_replicas=2, rank=self.global_rank, seed=3)
        return DataLoader(data, 8, sampler=sampler)


seed_everything(0)
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp_find_unused_parameters_true",
    max_epochs=3,
    logger=False,
    use_distributed_sampler=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
net = Adversarial()
trainer.fit(net)
trainer.predict(net, DataLoader(dataset(37), 8))
