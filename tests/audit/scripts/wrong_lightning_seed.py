"""`seed_everything` gives all ranks the same masks."""

from lightning.pytorch import seed_everything
from lightning_parts import Net, fit

seed_everything(0)
fit(Net(), enable_checkpointing=False)
