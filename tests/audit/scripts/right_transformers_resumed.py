"""A Trainer resumes from a checkpoint within an epoch."""

from trainer_parts import trainer

options = {"save_strategy": "steps", "save_steps": 4, "output_dir": "resumed"}
trainer(max_steps=8, **options).train()
trainer(max_steps=12, **options).train(resume_from_checkpoint=True)
