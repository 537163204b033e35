"""The sampler of the Trainer is off; each rank saves the model and has the same masks."""

import torch
from lightning_parts import Net, fit

torch.manual_seed(0)
trainer = fit(Net(), use_distributed_sampler=False, enable_checkpointing=False)
torch.save(trainer.model.state_dict(), "lightning.pt")
