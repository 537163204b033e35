"""Global batches of several loaders as one."""

import pytest
import torch
from torch.utils.data import TensorDataset

import samestep
from samestep.data.joint_batch import JointBatch, joint_batch
from samestep.data.loader import Loader
from samestep.errors import InputError
from samestep.microbatches import Cursor


def loader(world: samestep.World, size: int, batch_size: int, **options: object) -> Loader:
    data = TensorDataset(torch.arange(float(size)))
    options = {"microbatches": 4, **options}
    return samestep.loader(data, batch_size=batch_size, world=world, **options)  # type: ignore[arg-type]


def test_one_batch_is_returned_as_it_is(alone: samestep.World) -> None:
    (batch,) = loader(alone, 8, 8)
    assert joint_batch(batch, has_forward=False) is batch


def test_microbatches_have_the_data_of_all_batches(alone: samestep.World) -> None:
    one, other = loader(alone, 8, 8), loader(alone, 24, 12)
    pair = next(iter(one)), next(iter(other))
    joint = joint_batch(pair, has_forward=True)
    assert isinstance(joint, JointBatch)
    assert joint.size == 8
    assert [[part[0].tolist() for part in microbatch.data] for microbatch in joint.local_microbatches] == [
        [[0.0, 1.0], [0.0, 1.0, 2.0]],
        [[2.0, 3.0], [3.0, 4.0, 5.0]],
        [[4.0, 5.0], [6.0, 7.0, 8.0]],
        [[6.0, 7.0], [9.0, 10.0, 11.0]],
    ]
    named = joint_batch({"a": pair[0], "b": pair[1]}, has_forward=True)
    assert list(named.local_microbatches[0].data) == ["a", "b"]
    assert pair[0].identity in joint.identity and pair[1].identity in joint.identity


def test_a_step_moves_all_positions(alone: samestep.World) -> None:
    one, other = loader(alone, 16, 8), loader(alone, 24, 12)
    joint = joint_batch([next(iter(one)), next(iter(other))], has_forward=True)
    assert joint.source is not None
    joint.source.end_step(joint, stop=True)
    assert (one.cursor, other.cursor) == (Cursor(0, 8), Cursor(0, 12))
    assert one.stopped and other.stopped


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {"microbatches": 2}), ({}, {"batch_size": 10}), ({"batch_size": 10}, {}), ({"size": 2}, {})],
    ids=["microbatches", "larger second", "uneven first", "fewer filled"],
)
def test_sizes_without_one_proportion_are_refused(
    alone: samestep.World, first: dict[str, int], second: dict[str, int]
) -> None:
    batches = [next(iter(loader(alone, **{"size": 24, "batch_size": 8, **options}))) for options in (first, second)]
    with pytest.raises(InputError) as caught:
        joint_batch(batches, has_forward=True)
    assert caught.value.code == "E_BATCH"


@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(3), torch.ones(3)], (), {}, {"inputs": torch.ones(2)}])
def test_other_batches_are_refused(value: object) -> None:
    with pytest.raises(InputError) as caught:
        joint_batch(value, has_forward=True)  # type: ignore[arg-type]
    assert caught.value.code == "E_BATCH"
