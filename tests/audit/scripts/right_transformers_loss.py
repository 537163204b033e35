"""A loss of the script divides the sum over tokens by the number of all tokens; the Trainer saves the model."""

import torch.nn.functional as F
from trainer_parts import trainer
from transformers import Trainer


class Summed(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


runner = trainer(Summed, gradient_accumulation_steps=2)
runner.train()
runner.predict(runner.eval_dataset)
runner.save_model("model")
