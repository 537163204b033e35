"""Moving average of the weights: values, evaluation and checkpoints."""

from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import AVERAGE, Training, load, load_model, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.engine.ema import AveragedWeights
from samestep.engine.engine import Engine
from samestep.errors import CheckpointError, InputError
from samestep.launcher.launch import launch
from workers.transforms import BATCH, MICROBATCHES, Conv, data, engine_of, train

DECAY = 0.8


def training(engine: Engine) -> Training:
    assert engine.averaged is not None
    return Training(engine.model, engine.optimizer, None, engine.scaler, engine.averaged.tensors)


def test_average_equals_that_of_torch(alone: samestep.World) -> None:
    """The decay increases during the first steps."""
    engine = engine_of(alone, DECAY)
    decays = iter([2 / 11, 3 / 12, 4 / 13, 5 / 14])

    def move(average: list[torch.Tensor], weights: list[torch.Tensor], count: int) -> None:
        get_ema_multi_avg_fn(next(decays))(average, weights, count)

    reference = AveragedModel(engine.model, multi_avg_fn=move)
    reference.update_parameters(engine.model)  # its first update is a copy
    for batch in samestep.loader(data(), batch_size=BATCH, microbatches=MICROBATCHES, world=alone):
        engine.step(batch)
        reference.update_parameters(engine.model)
    assert engine.averaged is not None
    expected = dict(reference.module.named_parameters())
    assert engine.averaged.tensors.keys() == expected.keys()
    for name, average in engine.averaged.tensors.items():
        assert torch.equal(average, expected[name]), name
    assert not torch.equal(engine.averaged.tensors["head.weight"], engine.model.head.weight)


def test_later_steps_use_the_configured_decay() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    averaged = AveragedWeights(dict(model.named_parameters()), DECAY)
    before = averaged.tensors["weight"].clone()
    with torch.no_grad():
        model.weight.fill_(5.0)
    averaged.update(1000)
    assert torch.allclose(averaged.tensors["weight"], DECAY * before + (1 - DECAY) * 5)


def test_evaluation_uses_the_average_and_restores_the_weights(alone: samestep.World) -> None:
    engine = engine_of(alone, DECAY)
    batches = samestep.loader(data(), batch_size=BATCH, microbatches=MICROBATCHES, world=alone)
    for batch in batches:
        engine.step(batch)
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    values = engine.evaluate(samestep.loader(data(), batch_size=BATCH, microbatches=MICROBATCHES, world=alone))
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
    other = engine_of(alone)
    assert engine.averaged is not None
    other.model.load_state_dict({**before, **engine.averaged.tensors})
    assert values == other.evaluate(samestep.loader(data(), batch_size=BATCH, microbatches=MICROBATCHES, world=alone))


def test_skipped_step_does_not_change_the_average(alone: samestep.World) -> None:
    engine = engine_of(alone, DECAY, non_finite="skip")
    with torch.no_grad():
        engine.model.head.bias[0] = float("nan")
    assert engine.averaged is not None
    before = {name: tensor.clone() for name, tensor in engine.averaged.tensors.items()}
    result = engine.step(next(iter(samestep.loader(data(), batch_size=BATCH, microbatches=MICROBATCHES, world=alone))))
    assert result.skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.averaged.tensors.items())


def test_average_has_the_same_bits_on_any_number_of_ranks() -> None:
    alone = launch(train, {}, DECAY, processes=1)
    assert launch(train, {}, DECAY, processes=3) == alone
    assert alone[1] != launch(train, {}, processes=1)[1], "evaluation uses the average"


def test_checkpoint_contains_the_average(alone: samestep.World, tmp_path: Path) -> None:
    engine = engine_of(alone, DECAY)
    for batch in samestep.loader(data(), batch_size=BATCH, microbatches=MICROBATCHES, world=alone):
        engine.step(batch)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    saved = folder.write(engine.steps, pack(training(engine), Progress(step=engine.steps)), is_best=False)
    assert (saved / AVERAGE).is_file()
    other = engine_of(alone, DECAY)
    load(saved, training(other))
    assert engine.averaged is not None and other.averaged is not None
    for name, average in engine.averaged.tensors.items():
        assert torch.equal(other.averaged.tensors[name], average)
    averaged, last = Conv(), Conv()
    load_model(saved, averaged, averaged=True)
    load_model(saved, last)
    assert torch.equal(averaged.head.weight, engine.averaged.tensors["head.weight"])
    assert torch.equal(last.head.weight, engine.model.head.weight)
    assert torch.equal(averaged.blocks[0][1].running_mean, engine.model.blocks[0][1].running_mean)


def test_checkpoint_without_an_average_is_refused(alone: samestep.World, tmp_path: Path) -> None:
    plain = engine_of(alone)
    files = pack(Training(plain.model, plain.optimizer, None, plain.scaler), Progress(step=0))
    saved = CheckpointFolder(tmp_path / "checkpoints").write(1, files, is_best=False)
    with pytest.raises(CheckpointError, match=r"average\.safetensors"):
        load(saved, training(engine_of(alone, DECAY)))


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, 2.0])
def test_invalid_decay_is_refused(alone: samestep.World, decay: float) -> None:
    with pytest.raises(InputError, match="ema is"):
        engine_of(alone, decay)
