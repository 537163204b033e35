"""Loops that depend on the rank by mistake: right on one process, refused on several."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

import samestep
from own_loops.cases import Setting, refused_with_several, same
from own_loops.modes import Points

BATCH, DESYNC, STATE, SETTINGS = "E_RANK_BATCH", "E_RANK_DESYNC", "E_RANK_MISMATCH", "E_RANK_SETTINGS"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(net: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def engine_of(setting: Setting, net: nn.Module, **options: Any) -> samestep.Engine:
    optimizer = options.pop("optimizer", None) or sgd(net)
    return samestep.Engine(net, optimizer, nn.CrossEntropyLoss(), world=setting.world, **options)


def batches_of(setting: Setting, dataset: Any = None, **options: Any) -> Any:
    settings = {"batch_size": 16, "microbatches": 4, "shuffle": True, "world": setting.world, **options}
    return samestep.loader(dataset or Points(), **settings)


def steps(setting: Setting, batches: Iterable[Any], net: nn.Module | None = None, **options: Any) -> Any:
    """Step all batches; return the model and the losses."""
    net = net or model()
    engine = engine_of(setting, net, **options)
    losses = [engine.step(batch).loss for batch in batches]
    assert losses
    return net, losses


def last(setting: Setting) -> bool:
    """Whether this is the last rank."""
    return setting.world.rank == setting.world.size - 1


@refused_with_several(BATCH)
def rank_zero_skips_a_batch(setting: Setting) -> Any:
    kept = [b for number, b in enumerate(batches_of(setting)) if number != 1 or not setting.world.is_main]
    return steps(setting, kept)


@refused_with_several(BATCH)
def rank_zero_repeats_the_third_batch_instead_of_a_short_one(setting: Setting) -> Any:
    # After some steps, the comparison overlaps with the forward. The short batch leaves some ranks without samples.
    batches = list(batches_of(setting))
    return steps(setting, batches[:3] + batches[2:3] if setting.world.is_main and setting.world.size > 1 else batches)


@refused_with_several(BATCH)
def dataset_is_longer_on_higher_ranks(setting: Setting) -> Any:
    return steps(setting, batches_of(setting, Points(50 + setting.world.rank)))


@refused_with_several(BATCH)
def dataset_is_one_part_of_the_data_per_rank(setting: Setting) -> Any:
    own = range(setting.world.rank, 50, setting.world.size)
    return steps(setting, batches_of(setting, Subset(Points(), own), batch_size=8))


@refused_with_several(BATCH)
def samples_differ_between_ranks(setting: Setting) -> Any:
    points = Points()
    points._inputs += setting.world.rank
    return steps(setting, batches_of(setting, points))


@refused_with_several(BATCH)
def seed_of_the_order_is_the_rank(setting: Setting) -> Any:
    return steps(setting, batches_of(setting, seed=setting.world.rank))


@refused_with_several(BATCH)
def batch_size_depends_on_the_rank(setting: Setting) -> Any:
    return steps(setting, batches_of(setting, batch_size=16 + 4 * setting.world.rank))


@refused_with_several(BATCH)
def evaluation_data_differ_between_ranks(setting: Setting) -> Any:
    engine = engine_of(setting, model())
    return engine.evaluate(batches_of(setting, Points(20 + setting.world.rank), shuffle=False))


@refused_with_several(DESYNC)
def loop_ends_early_on_rank_zero(setting: Setting) -> Any:
    return steps(setting, islice(batches_of(setting), 2 if setting.world.is_main else None))


@refused_with_several(DESYNC)
def only_rank_zero_evaluates_between_epochs(setting: Setting) -> Any:
    net = model()
    engine = engine_of(setting, net)
    batches = batches_of(setting)
    values = []
    for _ in range(2):
        for batch in batches:
            engine.step(batch)
        if setting.world.is_main:
            values.append(engine.evaluate(batches_of(setting, Points(20), shuffle=False)))
    return net, values


@refused_with_several(DESYNC)
def only_rank_zero_saves(setting: Setting) -> Any:
    net, batches = model(), batches_of(setting)
    engine = engine_of(setting, net)
    checkpoints = samestep.CheckpointManager(setting.folder, engine, batches)
    for batch in batches:
        engine.step(batch)
        if setting.world.is_main:
            checkpoints.save()
    return net


@refused_with_several(DESYNC)
def only_rank_zero_makes_a_second_engine(setting: Setting) -> Any:
    net = model()
    engine = engine_of(setting, net)
    if setting.world.is_main:
        engine_of(setting, model())
    return net, [engine.step(batch).loss for batch in batches_of(setting)]


@refused_with_several(DESYNC)
def only_rank_zero_waits_at_a_barrier(setting: Setting) -> Any:
    net = model()
    engine = engine_of(setting, net)
    for batch in batches_of(setting):
        engine.step(batch)
        if setting.world.is_main:
            setting.world.barrier()
    return net


@refused_with_several(STATE)
def initial_weights_are_seeded_by_rank(setting: Setting) -> Any:
    torch.manual_seed(setting.world.rank)
    return steps(setting, batches_of(setting), nn.Linear(6, 3))


@refused_with_several(STATE)
def weights_are_loaded_on_the_last_rank_after_the_engine(setting: Setting) -> Any:
    net = model()
    engine = engine_of(setting, net)
    if last(setting):
        net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})
    return net, [engine.step(batch).loss for batch in batches_of(setting)]


@refused_with_several(STATE)
def initial_statistics_of_batch_norm_differ(setting: Setting) -> Any:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    net[1].running_mean += setting.world.rank
    return steps(setting, batches_of(setting, drop_last=True), net)


@refused_with_several(STATE)
def width_of_the_model_depends_on_the_rank(setting: Setting) -> Any:
    width = 8 + setting.world.rank
    return steps(setting, batches_of(setting), nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3)))


@refused_with_several(SETTINGS)
def learning_rate_is_halved_on_rank_zero(setting: Setting) -> Any:
    net = model()
    engine = engine_of(setting, net)
    for number, batch in enumerate(batches_of(setting)):
        if number == 2 and setting.world.is_main:
            engine.optimizer.param_groups[0]["lr"] /= 2
        engine.step(batch)
    return net


@refused_with_several(SETTINGS)
def optimizer_depends_on_the_rank(setting: Setting) -> Any:
    net = model()
    kind = torch.optim.SGD if setting.world.is_main else torch.optim.Adam
    return steps(setting, batches_of(setting), net, optimizer=kind(net.parameters(), lr=0.01))


@refused_with_several(SETTINGS)
def clipping_depends_on_the_rank(setting: Setting) -> Any:
    config = samestep.StepConfig(clip_norm=0.1 * (1 + setting.world.rank))
    return steps(setting, batches_of(setting), config=config)


@refused_with_several(SETTINGS)
def seed_of_dropout_is_the_rank(setting: Setting) -> Any:
    net = nn.Sequential(model(), nn.Dropout(0.5))
    return steps(setting, batches_of(setting), net, config=samestep.StepConfig(seed=setting.world.rank))


@refused_with_several(STATE)
def parameter_is_changed_on_rank_zero(setting: Setting) -> Any:
    net = model()
    engine = engine_of(setting, net)
    for number, batch in enumerate(batches_of(setting)):
        engine.step(batch)
        if number == 1 and setting.world.is_main:
            net[0].bias.data.add_(1.0)
    return net


@refused_with_several(STATE)
def parameter_is_changed_on_rank_zero_before_a_save(setting: Setting) -> Any:
    net, batches = model(), batches_of(setting)
    engine = engine_of(setting, net)
    checkpoints = samestep.CheckpointManager(setting.folder, engine, batches)
    for batch in batches:
        engine.step(batch)
    if setting.world.is_main:
        net[0].bias.data.clamp_(-0.01, 0.01)
    checkpoints.save()
    return net


@refused_with_several(STATE)
def momentum_is_cleared_on_the_last_rank(setting: Setting) -> Any:
    net = model()
    engine = engine_of(setting, net)
    for number, batch in enumerate(batches_of(setting)):
        engine.step(batch)
        if number == 1 and last(setting):
            engine.optimizer.state.clear()
    return net


@refused_with_several(STATE)
def weights_are_changed_on_rank_zero_after_the_last_step(setting: Setting) -> Any:
    net, losses = steps(setting, batches_of(setting))
    if setting.world.is_main:
        net[0].bias.data.zero_()
    return net, losses


@same
def rank_zero_reads_the_result_and_writes_a_file(setting: Setting) -> Any:
    net = model()
    engine = engine_of(setting, net)
    for batch in batches_of(setting):
        loss = engine.step(batch).loss
        if setting.world.is_main:
            (setting.folder / "loss").write_text(str(loss))
    return net


@same
def engine_is_dropped_before_the_end(setting: Setting) -> Any:
    results = [steps(setting, batches_of(setting))[1] for _ in range(2)]
    assert results[0] == results[1]
    return results
