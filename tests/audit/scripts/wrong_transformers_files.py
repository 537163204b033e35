"""Each rank saves the model."""

import torch
from trainer_parts import trainer

runner = trainer()
runner.train()
torch.save(runner.model.state_dict(), "transformers.pt")
