"""Commands on another number of processes."""

import pytest

from samestep.errors import InputError
from samestep.tools.audit.against import reference_command


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["torchrun", "--nproc-per-node", "4", "train.py"], ["torchrun", "--nproc-per-node", "1", "train.py"]),
        (["torchrun", "--nproc_per_node=gpu", "train.py"], ["torchrun", "--nproc_per_node=1", "train.py"]),
        (
            ["accelerate", "launch", "--num_processes=4", "train.py"],
            ["accelerate", "launch", "--num_processes=1", "train.py"],
        ),
    ],
)
def test_number_of_processes_is_replaced(command: list[str], expected: list[str]) -> None:
    assert reference_command(command, 1) == expected


@pytest.mark.parametrize(
    "command", [["python", "train.py"], ["torchrun", "--nproc-per-node=2", "train.py", "--num_processes", "2"]]
)
def test_command_without_exactly_one_number(command: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        reference_command(command, 1)
    assert caught.value.code == "E_OPTION_CONFLICT"
