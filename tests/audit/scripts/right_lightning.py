"""Trainer with ddp, accumulation, validation, and its checkpoints."""

from lightning_parts import Net, fit, seed

seed()
trainer = fit(Net(), accumulate_grad_batches=2)
trainer.strategy.barrier()
