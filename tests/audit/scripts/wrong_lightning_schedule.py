"""A hook steps the schedule with each microbatch, and the Trainer with each epoch."""

import torch
from lightning_parts import Net, fit, seed


class Stepped(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return [optimizer], [schedule]

    def on_train_batch_end(self, *_):
        self.lr_schedulers().step()


seed()
fit(Stepped(), max_epochs=3, accumulate_grad_batches=2, enable_checkpointing=False)
