"""Rank 0 alone loads weights after the model was replicated."""

import torch
from trainer_parts import trainer
from transformers import TrainerCallback


class Loads(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        if state.is_world_process_zero and state.global_step == 0:
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)


runner = trainer()
runner.add_callback(Loads())
runner.train()
