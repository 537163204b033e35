"""Trainer of transformers with padded rows, evaluation, a schedule with warm-up and checkpoints."""

from trainer_parts import trainer

trainer(
    gradient_accumulation_steps=2,
    warmup_steps=2,
    lr_scheduler_type="linear",
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=2,
).train()
