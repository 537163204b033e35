"""Buffers, parameters and numbers that the forward of a model changes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

import samestep
from own_loops.cases import Setting, refused, same
from own_loops.modes import Points

STEPS = 8  # of two epochs of 50 samples


class Watched(nn.Module):
    """A linear layer, before which `change` sees the inputs of each training forward."""

    def __init__(self, change: Callable[[nn.Module, torch.Tensor], None], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.change = change
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.change(self, inputs)
        return self.linear(inputs)


def train(setting: Setting, model: nn.Module, buffers: Mapping[str, Any] | None = None, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    engine = samestep.Engine(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        world=setting.world,
        config=samestep.StepConfig(**options),
        **({} if buffers is None else {"buffers": buffers}),
    )
    batches = samestep.loader(Points(), batch_size=16, microbatches=4, shuffle=True, world=setting.world)
    return [engine.step(batch).loss for _ in range(2) for batch in batches]


@contextmanager
def cleared_at_end(model: nn.Module) -> Iterator[None]:
    """Ranks compare parameters at the end of the world, also those of refused cases."""
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()


def state(model: nn.Module) -> Any:
    return list(model.named_buffers()), model


# Floating-point buffers: the mean over microbatches.


def _track_mean(module: nn.Module, inputs: torch.Tensor) -> None:
    module.mean.mul_(0.9).add_(0.1 * inputs.mean(0))


@same
def running_mean_is_averaged_over_microbatches(setting: Setting) -> Any:
    model = Watched(_track_mean, mean=torch.zeros(6))
    losses = train(setting, model)
    assert model.mean.any()
    return state(model), losses


@same
def running_mean_through_data_is_averaged(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        module.mean.data.mul_(0.9).add_(0.1 * inputs.mean(0))

    model = Watched(change, mean=torch.zeros(6))
    losses = train(setting, model)
    assert model.mean.any()
    return state(model), losses


@same
def running_mean_under_sync_batch_norm(setting: Setting) -> Any:
    model = nn.Sequential(Watched(_track_mean, mean=torch.zeros(6)), nn.BatchNorm1d(3))
    losses = train(setting, model, batch_norm="sync")
    assert model[0].mean.any()
    return state(model), losses


@same
def complex_running_mean_is_averaged(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        module.spectrum.mul_(0.9).add_(0.1 * torch.fft.fft(inputs).mean(0))

    model = Watched(change, spectrum=torch.zeros(6, dtype=torch.complex64))
    losses = train(setting, model)
    assert model.spectrum.imag.any()
    return state(model), losses


class VectorQuantizer(nn.Module):
    """Codebook with exponential moving averages (van den Oord et al., 2017), written through `.data`."""

    def __init__(self, codes: int = 5) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("codebook", torch.randn(codes, 4))
        self.register_buffer("sizes", torch.ones(codes))
        self.register_buffer("sums", self.codebook.clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        vectors = self.encoder(inputs)
        numbers = torch.cdist(vectors, self.codebook).argmin(1)
        codes = self.codebook[numbers]
        if self.training:
            chosen = nn.functional.one_hot(numbers, len(self.codebook)).float()
            self.sizes.data.mul_(0.9).add_(0.1 * chosen.sum(0))
            self.sums.data.mul_(0.9).add_(0.1 * chosen.T @ vectors.detach())
            self.codebook.data.copy_(self.sums / self.sizes[:, None])
        return self.decoder(vectors + (codes - vectors).detach())


@same
def codebook_is_averaged(setting: Setting) -> Any:
    model = VectorQuantizer()
    before = model.codebook.clone()
    losses = train(setting, model)
    assert not torch.equal(model.codebook, before)
    return state(model), losses


@same
def codebook_by_sums_of_changes(setting: Setting) -> Any:
    model = nn.Sequential(VectorQuantizer())
    losses = train(setting, model, {"*.sizes": "sum", "*.sums": "sum", "*.codebook": "last"})
    return state(model), losses


# Constants keep their bits.


@same
def constants_keep_their_bits(setting: Setting) -> Any:
    tables = {
        "third": torch.full((7,), 1 / 3, dtype=torch.float64),
        "phases": torch.polar(torch.ones(5, dtype=torch.float64), torch.arange(5.0, dtype=torch.float64)),
        "zero": torch.tensor([-0.0, 0.0]),
        "large": torch.tensor(2**60 + 1),
        "holes": torch.tensor([float("nan"), float("inf"), -float("inf")]),
        "mask": torch.ones(4, 4).tril().bool(),
        "positions": torch.arange(9),
        "short": torch.rand(5).half(),
    }
    model = Watched(lambda module, inputs: None, **{name: table.clone() for name, table in tables.items()})
    losses = train(setting, model)
    for name, table in tables.items():
        after = getattr(model, name)
        assert after.reshape(-1).view(torch.uint8).tolist() == table.reshape(-1).view(torch.uint8).tolist(), name
    return [getattr(model, name) for name in tables], model.linear, losses


@same
def running_mean_that_pauses_keeps_its_bits(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        if module.is_open:
            _track_mean(module, inputs)

    model = Watched(change, mean=torch.zeros(6, dtype=torch.float64))
    model.is_open = True
    first = train(setting, model)
    model.is_open, before = False, model.mean.clone()
    second = train(setting, model)
    assert torch.equal(model.mean, before)
    return state(model), first, second


# Integer and bool buffers: equal in all microbatches, or refused.


@same
def counter_counts_steps(setting: Setting) -> Any:
    model = Watched(lambda module, inputs: module.calls.add_(1), calls=torch.tensor(0))
    losses = train(setting, model)
    assert model.calls == STEPS
    return state(model), losses


class ActNorm(nn.Module):
    """Scale and bias from the first batch (Kingma and Dhariwal, 2018), with a flag."""

    def __init__(self, flag: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("bias", torch.zeros(6))
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("is_initialised", flag)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and not self.is_initialised:
            self.bias.copy_(inputs.mean(0))
            self.scale.copy_(1 / (inputs.std(0, unbiased=False) + 1e-6))
            self.is_initialised.fill_(1)
        return self.linear((inputs - self.bias) * self.scale)


@same
def initialisation_by_the_first_batch_with_a_bool_flag(setting: Setting) -> Any:
    model = ActNorm(torch.tensor(False))
    losses = train(setting, model)
    assert model.is_initialised
    assert model.bias.any()
    return state(model), losses


@refused("E_BUFFER")
def parameters_initialised_by_the_first_batch(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        if not module.is_initialised:
            module.linear.bias.data.copy_(inputs.mean(0)[:3])
            module.is_initialised.fill_(True)

    model = Watched(change, is_initialised=torch.tensor(False))
    with cleared_at_end(model):
        train(setting, model)


@refused("E_BUFFER")
def histogram_of_classes(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        module.histogram += torch.bincount(inputs.argmax(1), minlength=6)

    train(setting, Watched(change, histogram=torch.zeros(6, dtype=torch.int64)))


@same
def histogram_of_classes_as_a_sum(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        module.histogram += torch.bincount(inputs.argmax(1), minlength=6)

    model = Watched(change, histogram=torch.zeros(6, dtype=torch.int64))
    losses = train(setting, model, {"histogram": "sum"})
    assert model.histogram.sum() == 100
    return state(model), losses


class Queue(nn.Module):
    """Queue of keys with a pointer (He et al., 2020)."""

    def __init__(self, length: int = 12) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("queue", torch.randn(length, 6))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(inputs - 0.1 * self.queue.mean(0))
        if self.training:
            positions = (self.pointer + torch.arange(len(inputs))) % len(self.queue)
            self.queue[positions] = inputs
            self.pointer[0] = (self.pointer + len(inputs)) % len(self.queue)
        return outputs


@same
def queue_of_the_last_microbatch(setting: Setting) -> Any:
    model = Queue()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules: Any = {"buffers": {"queue": "last", "pointer": "last"}}
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world, **rules)
    points = Points()
    for batch in samestep.loader(points, batch_size=16, microbatches=4, shuffle=True, world=setting.world):
        engine.step(batch)
        assert any(torch.equal(row, points[int(batch.indices[-1])][0]) for row in model.queue)
    return state(model)


@refused("E_BUFFER")
def pointer_that_differs_between_microbatches(setting: Setting) -> Any:
    batches = samestep.loader(Points(), batch_size=15, microbatches=4, world=setting.world)
    model = Queue()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world)
    for batch in batches:
        engine.step(batch)


@refused("E_BUFFER")
def mean_of_an_integer_buffer(setting: Setting) -> Any:
    train(setting, Queue(), {"pointer": "mean"})


@refused("E_PATTERN")
def rule_for_a_buffer_that_does_not_exist(setting: Setting) -> Any:
    train(setting, Queue(), {"ques": "last"})


# Buffers that a forward registers.


@refused("E_BUFFER")
def buffer_registered_by_the_first_forward(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        if not hasattr(module, "centre"):
            module.register_buffer("centre", inputs.mean(0))

    train(setting, Watched(change))


@refused("E_BUFFER")
def buffer_that_grows(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        module.memory = torch.cat([module.memory, inputs])

    train(setting, Watched(change, memory=torch.zeros(1, 6)))


@same
def cache_as_long_as_the_inputs_is_not_kept(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        module.ones = torch.ones(len(inputs))

    model = Watched(change)
    model.register_buffer("ones", torch.ones(0), persistent=False)
    losses = train(setting, model)
    return state(model), losses


@same
def buffer_registered_between_steps(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        if "mean" in module._buffers:
            module.mean.mul_(0.9).add_(inputs.mean())

    model = Watched(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world)
    batches = samestep.loader(Points(), batch_size=16, microbatches=4, shuffle=True, world=setting.world)
    for epoch in range(2):
        if epoch:
            model.register_buffer("mean", torch.zeros(()))
        for batch in batches:
            engine.step(batch)
    assert model.mean != 0
    return state(model)


# Parameters that a forward writes.


@refused("E_BUFFER")
def embedding_with_max_norm(setting: Setting) -> Any:
    model = nn.Sequential(nn.Embedding(3, 6, max_norm=0.5), nn.Flatten(), nn.Linear(36, 3))

    class Classes(Points):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, target = super().__getitem__(index)
            return inputs.long().clamp(0, 2), target

    engine = samestep.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), world=setting.world
    )
    with cleared_at_end(model):
        for batch in samestep.loader(Classes(), batch_size=16, microbatches=4, world=setting.world):
            engine.step(batch)


@refused("E_BUFFER")
def weights_clamped_through_data_in_forward(setting: Setting) -> Any:
    train(setting, Watched(lambda module, inputs: module.linear.weight.data.clamp_(-0.1, 0.1)))


@same
def weights_clamped_between_steps(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world)
    for batch in samestep.loader(Points(), batch_size=16, microbatches=4, world=setting.world):
        engine.step(batch)
        with torch.no_grad():
            model.weight.clamp_(-0.1, 0.1)
    assert model.weight.abs().max() <= 0.1
    return model


class Momentum(nn.Module):
    """Query and key encoders; each forward moves the key encoder (He et al., 2020)."""

    def __init__(self, move: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 3), nn.Linear(6, 3)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.move = move

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    self.move(key, query)
        return self.query(inputs) + self.key(inputs)


def _replace_data(key: nn.Parameter, query: nn.Parameter) -> None:
    key.data = key.data * 0.9 + query.data * 0.1


def _in_place_of_data(key: nn.Parameter, query: nn.Parameter) -> None:
    key.data.mul_(0.9).add_(query.data, alpha=0.1)


@refused("E_BUFFER")
def key_encoder_moved_through_data_in_forward(setting: Setting) -> Any:
    model = Momentum(_in_place_of_data)
    with cleared_at_end(model):
        train(setting, model)


def _declared(setting: Setting, move: Callable[[nn.Parameter, nn.Parameter], None]) -> Any:
    """The key encoder moves once per step, as in a plain loop."""
    model, query = Momentum(move), nn.Linear(6, 3)
    query.load_state_dict(model.query.state_dict())
    key = query.weight.detach().clone()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    rules: Any = {"buffers": {"key.*": "last"}}
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world, **rules)
    for batch in samestep.loader(Points(), batch_size=16, microbatches=4, world=setting.world):
        before = model.query.weight.detach().clone()
        engine.step(batch)
        key = 0.9 * key + 0.1 * before
        assert torch.allclose(model.key.weight, key, rtol=1e-5, atol=1e-7)
    return model


@same
def key_encoder_that_is_declared(setting: Setting) -> Any:
    return _declared(setting, _replace_data)


# Numbers in attributes: of the last microbatch.


@same
def counter_in_an_attribute_counts_steps(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        module.calls += 1
        module.scale.fill_(1.0 / module.calls)

    model = Watched(change, scale=torch.ones(()))
    model.calls = 0
    losses = train(setting, model)
    assert model.calls == STEPS
    return state(model), model.calls, losses


@same
def running_mean_in_an_attribute_is_of_the_last_microbatch(setting: Setting) -> Any:
    def change(module: nn.Module, inputs: torch.Tensor) -> None:
        module.mean = 0.9 * module.mean + 0.1 * float(inputs.mean())

    model = Watched(change)
    model.mean = 0.0
    losses = train(setting, model)
    assert model.mean != 0.0
    return state(model), model.mean, losses


# Fake quantization.


def quantized() -> nn.Sequential:
    observed = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return nn.Sequential(nn.Linear(6, 8), observed, nn.Linear(8, 3))


@refused("E_BUFFER")
def zero_point_of_fake_quantization_that_differs_between_microbatches(setting: Setting) -> Any:
    train(setting, quantized())


@same
def fake_quantization_with_evaluation(setting: Setting) -> Any:
    model = quantized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules: Any = {"buffers": {"1.zero_point": "last"}}
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world, **rules)
    batches = samestep.loader(Points(), batch_size=16, microbatches=4, world=setting.world)
    evaluation = samestep.loader(Points(23), batch_size=8, microbatches=4, world=setting.world)
    values = []
    for batch in batches:
        engine.step(batch)
        before = [buffer.clone() for buffer in model.buffers()]
        values.append(engine.evaluate(evaluation))
        after = list(model.buffers())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return state(model), values


@same
def buffer_written_in_evaluation_keeps_its_value(setting: Setting) -> Any:
    class Adapting(nn.Module):
        """Test-time adaptation: the statistics of the evaluation move."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.calls += 1
                self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
            return self.linear(inputs - self.mean)

    model = Adapting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world)
    values = engine.evaluate(samestep.loader(Points(23), batch_size=8, microbatches=4, world=setting.world))
    assert model.calls == 0
    return values, state(model)


@refused("E_BUFFER")
def parameter_written_in_evaluation(setting: Setting) -> Any:
    class Renormed(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not self.training:
                with torch.no_grad():
                    self.weight.mul_(0.9).add_(inputs.mean())
            return super().forward(inputs)

    model = Renormed(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world)
    with cleared_at_end(model):
        engine.evaluate(samestep.loader(Points(23), batch_size=8, microbatches=4, world=setting.world))
