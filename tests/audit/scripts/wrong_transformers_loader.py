"""The loader of an overridden method is not prepared."""

from torch.utils.data import DataLoader
from trainer_parts import trainer
from transformers import Trainer


class Own(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, 4, shuffle=True)


trainer(Own).train()
