"""Rank functions for `strategies/test_global_losses.py`: a loss of the whole batch with every layout."""

from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep
from samestep.config import StepConfig
from samestep.errors import InputError
from workers.layouts import LAYOUTS, MODELS, PLANS, strategy_for

BATCH, MICROBATCHES = 20, 5
SAMPLES = {"chain": 62, "full": 71}  # the last batch has 2 samples, or 11 for batch norm


def pairs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of pairs of one class among all pairs of samples."""
    features = functional.normalize(outputs, dim=1)
    itself = torch.eye(len(features), dtype=torch.bool)
    logits = (features @ features.T * 4).masked_fill(itself, -1e9)
    positives = (targets[:, None] == targets) & ~itself
    return -(functional.log_softmax(logits, dim=1) * positives).sum(1).mean()


def train(name: str, model: str) -> dict[str, Any]:
    """Train two epochs; return losses, an evaluation and the weights."""
    inputs = torch.randn(SAMPLES[model], 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    with samestep.start(device="cpu", strategy=strategy_for(name, model)) as world:
        torch.manual_seed(0)
        net = MODELS[model]().double()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        config = StepConfig(gather="global", clip_norm=0.4, tensor_plan=PLANS[model])
        engine = samestep.Engine(net, optimizer, pairs, world=world, config=config)
        batches = samestep.loader(data, batch_size=BATCH, microbatches=MICROBATCHES, shuffle=True, world=world)
        losses = [engine.step(batch).loss for _ in range(2) for batch in batches]
        local = engine.local_parameters
        weights = {key: local.full_tensor(key, p.detach()).clone() for key, p in local.local.items()}
        return {"losses": losses, "evaluation": engine.evaluate(batches), "weights": weights}


def train_all(names: list[str], model: str) -> dict[str, dict[str, Any]]:
    return {name: train(name, model) for name in names}


def refusals(names: list[str]) -> dict[str, str]:
    """Return the error code of each layout."""
    codes = {}
    for name in names:
        with samestep.start(device="cpu", strategy=strategy_for(name, "chain")) as world:
            net = MODELS["chain"]()
            try:
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                samestep.Engine(net, optimizer, pairs, world=world, config=StepConfig(gather="global"))
            except InputError as error:
                codes[name] = error.code
    return codes


BY_RANKS = {ranks: [name for name in LAYOUTS if LAYOUTS[name][0] == ranks] for ranks in (1, 2, 3, 4)}
