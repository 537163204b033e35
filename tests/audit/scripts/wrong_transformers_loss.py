"""A loss of the script is the mean over the tokens of each batch."""

import torch.nn.functional as F
from trainer_parts import trainer
from transformers import Trainer


class Means(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = F.cross_entropy(logits, labels)
        return (loss, outputs) if return_outputs else loss


trainer(Means, gradient_accumulation_steps=2).train()
