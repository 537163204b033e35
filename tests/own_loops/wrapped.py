"""Wrapped models, and parameters and layers of unusual kinds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import samestep
from own_loops.cases import Setting, refused, same
from own_loops.modes import assert_trained_alike, batches_of, engine_of, plain_step, twins
from own_loops.parameters import network


def losses_of(setting: Setting, model: nn.Module, **options: Any) -> list[float]:
    engine = engine_of(setting, model, **options)
    return [engine.step(batch).loss for batch in batches_of(setting)]


def train_twice(setting: Setting, build: Callable[[], nn.Module], **options: Any) -> Any:
    """Train two epochs with an engine and in a plain loop, and compare the models."""
    models = twins(build)
    engine = engine_of(setting, models[0], **options)
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, models[1].parameters()), lr=0.1)
    losses = []
    for _ in range(2):
        for batch in batches_of(setting):
            losses.append(engine.step(batch).loss)
            plain_step(models[1], optimizer, batch)
    assert_trained_alike(*models)
    return models[0], losses, engine.evaluate(batches_of(setting, shuffle=False))


# --- wrapped models ---------------------------------------------------------------------------------------


@refused("E_WRAPPED_MODEL")
def model_in_distributed_data_parallel(setting: Setting) -> Any:
    return losses_of(setting, DistributedDataParallel(network()))


@same
def model_taken_out_of_distributed_data_parallel(setting: Setting) -> Any:
    wrapped = DistributedDataParallel(network())
    losses = losses_of(setting, wrapped.module)
    return losses, wrapped.module


@refused("E_WRAPPED_MODEL")
def model_in_fully_sharded_data_parallel(setting: Setting) -> Any:
    return losses_of(setting, FullyShardedDataParallel(network(), device_id=torch.device("cpu")))


@refused("E_WRAPPED_MODEL")
def model_sharded_by_fully_shard(setting: Setting) -> Any:
    mesh = torch.distributed.init_device_mesh("cpu", (setting.world.size,))
    return losses_of(setting, fully_shard(network(), mesh=mesh))


@refused("E_WRAPPED_MODEL")
def compiled_model(setting: Setting) -> Any:
    return losses_of(setting, torch.compile(network(), backend="eager"))


@refused("E_WRAPPED_MODEL")
def model_compiled_in_place(setting: Setting) -> Any:
    model = network()
    model.compile(backend="eager")
    return losses_of(setting, model)


@refused("E_WRAPPED_MODEL")
def part_compiled_after_the_engine_was_made(setting: Setting) -> Any:
    model = network()
    engine = engine_of(setting, model)
    model[2] = torch.compile(model[2], backend="eager")
    return [engine.step(batch).loss for batch in batches_of(setting)]


@refused("E_WRAPPED_MODEL")
def scripted_model(setting: Setting) -> Any:
    return losses_of(setting, torch.jit.script(network()))


# --- synchronized batch norm of torch ---------------------------------------------------------------------


def with_synchronized_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


@refused("E_BATCH_NORM")
def torch_sync_batch_norm_with_statistics_of_microbatches(setting: Setting) -> Any:
    return losses_of(setting, with_synchronized_batch_norm())


@same
def torch_sync_batch_norm_with_statistics_of_the_batch(setting: Setting) -> Any:
    torch.manual_seed(0)
    model = with_synchronized_batch_norm()
    return losses_of(setting, model, config=samestep.StepConfig(batch_norm="sync")), model


# --- parameters of unusual kinds --------------------------------------------------------------------------


@refused("E_PARAMETER")
def lazy_layer(setting: Setting) -> Any:
    return losses_of(setting, nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3)))


class Embedded(nn.Module):
    """Embeddings of the signs of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 3, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.table((inputs > 0).long() + 2 * torch.arange(6)).sum(1)


@refused("E_PARAMETER")
def sparse_gradients_of_an_embedding(setting: Setting) -> Any:
    return losses_of(setting, Embedded())


@refused("E_PARAMETER")
def sparse_gradients_of_a_function(setting: Setting) -> Any:
    class Functional(Embedded):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            indices = (inputs > 0).long() + 2 * torch.arange(6)
            return functional.embedding(indices, self.table.weight, sparse=True).sum(1)

    return losses_of(setting, Functional())


class Filtered(nn.Module):
    """A complex filter of the spectrum of the inputs."""

    def __init__(self, *, as_real: bool = False) -> None:
        super().__init__()
        values = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
        self.filter = nn.Parameter(values if as_real else torch.view_as_complex(values))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        factors = self.filter if self.filter.is_complex() else torch.view_as_complex(self.filter)
        return self.head(torch.fft.irfft(torch.fft.rfft(inputs) * factors, n=6))


@refused("E_PARAMETER")
def complex_parameter(setting: Setting) -> Any:
    return losses_of(setting, Filtered())


@same
def complex_values_in_a_real_parameter(setting: Setting) -> Any:
    return train_twice(setting, lambda: Filtered(as_real=True))


class Scaled(nn.Module):
    """Parameters of several shapes and types: a number, an empty one, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.head(inputs) + self.table + self.empty.sum()


@same
def scalar_empty_and_integer_parameters(setting: Setting) -> Any:
    return train_twice(setting, Scaled)


@same
def parameters_of_two_precisions(setting: Setting) -> Any:
    class Mixed(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](inputs.double()).float())

    return train_twice(setting, lambda: Mixed(nn.Linear(6, 8).double(), nn.Linear(8, 3)))


# --- shared, unused and recomputed layers -----------------------------------------------------------------


class Tied(nn.Module):
    """An output layer with the weights of the input layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


@same
def tied_weights(setting: Setting) -> Any:
    return train_twice(setting, Tied)


@refused("E_UNUSED_PARAMETER")
def parameter_that_no_forward_uses(setting: Setting) -> Any:
    model = Tied()
    model.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    return losses_of(setting, model)


class Recomputed(nn.Module):
    """A layer that is used twice in each forward, recomputed in backward."""

    def __init__(self, uses: int = 2, *, reentrant: bool = True) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self._uses, self._reentrant = uses, reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.first(inputs)
        for _ in range(self._uses):
            outputs = torch.tanh(checkpoint(self.shared, outputs, use_reentrant=self._reentrant))
        return self.head(outputs)


@same
def reentrant_checkpoint_of_a_shared_layer(setting: Setting) -> Any:
    return train_twice(setting, Recomputed)


@same
def checkpoint_of_a_shared_layer(setting: Setting) -> Any:
    return train_twice(setting, lambda: Recomputed(reentrant=False))


@same
def layer_used_by_two_engines(setting: Setting) -> Any:
    body, heads = nn.Linear(6, 8), [nn.Linear(8, 3), nn.Linear(8, 3)]
    models = [nn.Sequential(body, nn.Tanh(), head) for head in heads]
    engines = [engine_of(setting, model) for model in models]
    losses = [engine.step(batch).loss for batch in batches_of(setting) for engine in engines]
    return models, losses
