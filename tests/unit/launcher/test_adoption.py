"""Worlds in a process group that another library has created."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import samestep
from helpers.started import as_torchrun, free_port, python, ranks
from samestep.errors import InputError
from workers import adopted


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(2, ["--group"], marks=pytest.mark.slow),
        pytest.param(3, ["--group", "--init"], marks=pytest.mark.long),
        pytest.param(2, ["--group", "--init", "--destroy"], marks=pytest.mark.long),
        pytest.param(1, ["--group"], marks=pytest.mark.long),
        pytest.param(1, [], marks=pytest.mark.long),
    ],
)
def test_steps_have_the_bits_of_other_worlds(
    size: int, options: list[str], alone: samestep.World, tmp_path: Path
) -> None:
    variables = as_torchrun(free_port())
    with ranks(variables, size, *options, cwd=tmp_path, command=python("-m", "workers.adopted")) as started:
        results = started.wait()
    assert [result.code for result in results] == [0] * size, results[0].err
    assert {result.out.strip() for result in results} == {adopted.trained(alone)}


def test_device_must_exist(alone: samestep.World) -> None:
    with (
        pytest.raises(InputError) as error,
        samestep.start(device="cuda", adopt=True, timeout=timedelta(seconds=60)),
    ):
        pass
    assert error.value.code == "E_DEVICES"
    assert dist.is_initialized()
