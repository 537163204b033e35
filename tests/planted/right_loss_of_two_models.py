"""Two models with an optimizer each, which train one another."""

import torch
from parts import FEATURES, Plain, Points, batches_of, seeded, sgd
from torch import nn

import samestep

generator = samestep.parallel(seeded(nn.Linear, 4, FEATURES))
critic = samestep.parallel(seeded(Plain))
optimizers = sgd(generator, lr=0.01), sgd(critic, lr=0.01)
for inputs, _ in batches_of(Points()):
    made = generator(torch.randn(len(inputs), 4))
    optimizers[1].zero_grad()
    (critic(made.detach()).mean() - critic(inputs).mean()).backward()
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    optimizers[1].step()
    optimizers[0].zero_grad()
    (-critic(made).mean()).backward()
    optimizers[0].step()
    print(f"{made.mean().item():.3f}")
