"""Training with the trainer of Transformers."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import random_split
from transformers import Trainer, TrainingArguments

torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = [
    {"inputs": image.float() / 16, "labels": label}
    for image, label in zip(images, labels, strict=True)
]
train, test = random_split(data, [1400, 397])


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, inputs, labels):
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


arguments = TrainingArguments(
    num_train_epochs=3,
    learning_rate=0.01,
    per_device_train_batch_size=64,
    per_device_eval_batch_size=64,
    train_sampling_strategy="sequential",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(Digits(), arguments, train_dataset=train, eval_dataset=test)
trainer.train()
values = trainer.evaluate()
print(f"loss {values['eval_loss']:.4f}")
