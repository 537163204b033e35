"""Loops whose data, code or models depend on their surroundings: ranks, time, files, hash seeds, the environment."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import samestep
from own_loops.buffers import cleared_at_end
from own_loops.cases import Setting, refused, refused_with_several, same
from own_loops.modes import Points
from own_loops.ranks import BATCH, SETTINGS, STATE, batches_of, engine_of, model, steps
from samestep.microbatches import Cursor

# Datasets of equal length with other contents on one rank.


@refused_with_several(BATCH)
def one_sample_in_the_middle_differs(setting: Setting) -> Any:
    points = Points()
    points._inputs[25] += setting.world.rank
    return steps(setting, batches_of(setting, points))


class Scaled(Points):
    """Points whose scale depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs * (1 + self.epoch), target


@same
def rank_zero_reads_a_sample_of_another_epoch_first(setting: Setting) -> Any:
    batches = batches_of(setting, Scaled())
    if setting.world.is_main:
        next(iter(batches))
    batches.cursor = Cursor(1)
    return steps(setting, batches)


@same
def a_broken_sample_that_no_epoch_uses(setting: Setting) -> Any:
    class Broken(Points):
        def __getitem__(self, index: int) -> Any:
            if index in (0, 25, 49):
                raise ValueError(f"file {index} is broken")
            return super().__getitem__(index)

    used = [index for index in range(50) if index not in (0, 25, 49)]
    return steps(setting, batches_of(setting, Broken(), shuffle=False, sampler=used))


# Random numbers of the script.


def step_with(setting: Setting, before: Callable[[samestep.Engine], None], net: nn.Module | None = None) -> Any:
    """Train for two epochs, with a call before each step; return the model and the losses."""
    net = net or model()
    engine, batches = engine_of(setting, net), batches_of(setting)
    losses = []
    for _ in range(2):
        for batch in batches:
            before(engine)
            losses.append(engine.step(batch).loss)
    return net, losses


@same
def noise_of_weights_between_steps(setting: Setting) -> Any:
    def perturb(engine: samestep.Engine) -> None:
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)

    return step_with(setting, perturb)


@refused_with_several(STATE)
def noise_of_weights_after_a_draw_on_rank_zero(setting: Setting) -> Any:
    net = model()
    if setting.world.is_main:
        torch.rand(1)  # for a plot
    engine = engine_of(setting, net)
    for batch in batches_of(setting):
        engine.step(batch)
        with torch.no_grad():
            net[0].weight.add_(torch.randn_like(net[0].weight), alpha=0.01)
    return net


@refused_with_several(SETTINGS)
def rate_drawn_at_random_on_each_rank(setting: Setting) -> Any:
    random.seed(setting.world.rank)
    return step_with(setting, lambda engine: engine.optimizer.param_groups[0].update(lr=random.uniform(0.01, 0.1)))[1]


@same
def mixup_with_a_number_drawn_in_the_loop(setting: Setting) -> Any:
    net = model()
    engine = engine_of(setting, net)
    for batch in batches_of(setting):
        share = float(numpy.random.beta(0.4, 0.4))

        def forward(model: nn.Module, data: Any, share: float = share) -> Any:
            inputs, targets = data
            order = torch.randperm(len(inputs))
            outputs = model(share * inputs + (1 - share) * inputs[order])
            return share * cross_entropy(outputs, targets) + (1 - share) * cross_entropy(outputs, targets[order])

        engine.step(batch, forward=forward)
    return net


class Drawing(nn.Module):
    """A layer that adds noise by a function without arguments."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(6, 3), draw

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs + self.noise()) if self.training else self.linear(inputs)

    def noise(self) -> Any:
        return self.draw()


@same
def noise_of_the_generators_of_python_and_numpy(setting: Setting) -> Any:
    return steps(setting, batches_of(setting), Drawing(lambda: random.gauss(0, 1) + numpy.random.normal()))


@refused("E_BUFFER")
def noise_of_generators_that_the_model_holds(setting: Setting) -> Any:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.one = torch.Generator().manual_seed(1)
            self.other, self.third = numpy.random.default_rng(2), random.Random(3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            noise = torch.randn((), generator=self.one) + self.other.normal() + self.third.random()
            return self.linear(inputs + noise)

    net = Noisy()
    with cleared_at_end(net):
        steps(setting, batches_of(setting), net)


@refused("E_UNUSED_PARAMETER")
def layers_dropped_at_random(setting: Setting) -> Any:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                inputs = inputs + layer(inputs) if random.random() < 0.3 else inputs
            return self.head(inputs)

    steps(setting, batches_of(setting), Dropped())


# State outside of the model.


@refused("E_BUFFER")
def counter_in_the_forward_function(setting: Setting) -> Any:
    calls, net = 0, model()
    engine = engine_of(setting, net)

    def forward(model: nn.Module, data: Any) -> Any:
        nonlocal calls
        calls += 1
        return cross_entropy(model(data[0]) / (1 + calls), data[1])

    with cleared_at_end(net):
        for batch in batches_of(setting):
            engine.step(batch, forward=forward)


@same
def results_appended_to_a_list_for_a_plot(setting: Setting) -> Any:
    seen: list[float] = []
    net = model()
    engine = engine_of(setting, net)

    def forward(model: nn.Module, data: Any) -> Any:
        loss = cross_entropy(model(data[0]), data[1])
        seen.append(float(loss))
        return loss

    return net, [engine.step(batch, forward=forward).loss for batch in batches_of(setting)]


# Precision, functions and layers of torch.


@same
def autocast_by_hand_in_the_forward_function(setting: Setting) -> Any:
    def forward(model: nn.Module, data: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(data[0])
        return cross_entropy(outputs.float(), data[1])

    net = model()
    engine = engine_of(setting, net)
    return net, [engine.step(batch, forward=forward).loss for batch in batches_of(setting)]


@same
def float64_as_the_default_type(setting: Setting) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return steps(setting, batches_of(setting), nn.Linear(6, 3))
    finally:
        torch.set_default_dtype(torch.float32)


@same
def inner_step_of_meta_learning(setting: Setting) -> Any:
    def forward(model: nn.Module, data: Any) -> Any:
        weights = dict(model.named_parameters())
        loss = cross_entropy(torch.func.functional_call(model, weights, (data[0],)), data[1])
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {name: value - 0.1 * slope for (name, value), slope in zip(weights.items(), slopes, strict=True)}
        return cross_entropy(torch.func.functional_call(model, adapted, (data[0],)), data[1])

    net = model()
    engine = engine_of(setting, net)
    return net, [engine.step(batch, forward=forward).loss for batch in batches_of(setting)]


@same
def parametrizations_of_weights(setting: Setting) -> Any:
    norms = nn.utils.parametrizations
    net = nn.Sequential(
        norms.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), norms.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3)
    )
    return list(net.buffers()), steps(setting, batches_of(setting), net)


@same
def hooks_that_change_outputs_and_gradients(setting: Setting) -> Any:
    net = model()
    net[0].register_forward_hook(lambda module, inputs, outputs: outputs * 1.1)
    net[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return steps(setting, batches_of(setting), net)


@same
def groups_from_sets_of_parameters(setting: Setting) -> Any:
    net = model()
    decayed = {parameter for parameter in net.parameters() if parameter.dim() > 1}
    others = set(net.parameters()) - decayed
    optimizer = torch.optim.AdamW([{"params": list(decayed), "weight_decay": 0.1}, {"params": list(others)}], lr=0.01)
    return steps(setting, batches_of(setting), net, optimizer=optimizer)


@same
def stochastic_weight_averaging_by_hand(setting: Setting) -> Any:
    net = model()
    averaged, engine = torch.optim.swa_utils.AveragedModel(net), engine_of(setting, net)
    for batch in batches_of(setting):
        engine.step(batch)
        averaged.update_parameters(net)
    return averaged, samestep.evaluate(averaged, batches_of(setting), ["accuracy"], world=setting.world)


@same
def gradients_of_the_script_before_a_step(setting: Setting) -> Any:
    net, points = model(), Points(4)
    rows = torch.stack([points[index][0] for index in range(4)])
    return step_with(setting, lambda engine: engine.model(rows).sum().backward(), net)
