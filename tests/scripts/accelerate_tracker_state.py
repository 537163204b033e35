"""Accelerate with a TensorBoard tracker, checkpoints of the whole state, a resume in the middle of an epoch and skipped batches."""

import os
import shutil

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FOLDER = "accelerate_project"


class Autoencoder(nn.Module):
    def __init__(self, width=96, hidden=256, code=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        noisy = F.dropout(x, 0.2, self.training)
        return self.decoder(self.encoder(noisy))


def build(accelerator):
    set_seed(3)
    basis = torch.randn(8, 96)
    data = torch.randn(384, 8) @ basis + 0.1 * torch.randn(384, 96)
    loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train(accelerator, parts, first_step, last_step, epoch, loader=None):
    """Train from one step to another, tracking the loss; return the losses."""
    model, optimizer, whole_loader, scheduler = parts
    losses = []
    step = first_step
    while step < last_step:
        for (batch,) in loader or whole_loader:
            loss = F.mse_loss(model(batch), batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            losses.append(loss.item())
            accelerator.log({"loss": loss.item(), "rate": scheduler.get_last_lr()[0], "epoch": epoch}, step=step)
            if step == 8:
                accelerator.save_state(os.path.join(FOLDER, f"step_{step}"))
            if step == last_step:
                break
        loader = None
        epoch += 1
    return losses


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    config = ProjectConfiguration(project_dir=FOLDER, logging_dir=os.path.join(FOLDER, "logs"))
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_config=config)
    accelerator.init_trackers("autoencoder", {"lr": 2e-3, "batch_size": 64})
    parts = build(accelerator)
    losses = train(accelerator, parts, 0, 14, 0)
    for step, loss in enumerate(losses):
        accelerator.print(f"step {step + 1}: {loss:.4f}")

    accelerator.print("files", sorted(os.listdir(os.path.join(FOLDER, "step_8"))))
    accelerator.load_state(os.path.join(FOLDER, "step_8"))
    remaining = accelerator.skip_first_batches(parts[2], 2)
    again = train(accelerator, parts, 8, 12, 1, loader=remaining)
    for step, loss in enumerate(again):
        accelerator.print(f"step {step + 9} again: {loss:.4f}")
    accelerator.end_training()

    events = EventAccumulator(os.path.join(FOLDER, "logs", "autoencoder"))
    events.Reload()
    scalars = events.Scalars("loss")
    accelerator.print(
        "tracked", len(scalars), f"{scalars[-1].value:.4f}", f"rate {events.Scalars('rate')[-1].value:.6f}"
    )


if __name__ == "__main__":
    main()
