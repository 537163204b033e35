"""Checkpoints of a loop of the script, resumed on other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from helpers.system import samestep as samestep_command
from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import InputError
from samestep.launcher.failure import RankError
from workers import sessions

SCRIPT = """
import samestep, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = samestep.loader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2)
checkpoints = samestep.CheckpointManager("checkpoints", model, batches, optimizer=optimizer)
for epoch in checkpoints.epochs(2):
    for rows, in batches:
        model(rows).sum().backward()
        optimizer.step()
    print(epoch)
"""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the uninterrupted run."""
    result: list[float] = samestep.launch(sessions.train, tmp_path_factory.mktemp("whole"), 3, processes=1)
    assert len(result) == 18
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [(3, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 3), (2, 1)))]
)
def test_killed_run_resumes_on_another_number_of_ranks(
    tmp_path: Path, losses: list[float], first: int, second: int
) -> None:
    before = samestep.launch(sessions.train, tmp_path, 3, 8, processes=first)
    assert before == pytest.approx(losses[:8])
    names = [path.name for path in CheckpointFolder(tmp_path).steps()]
    assert names[-1] == "step-000000008"
    after = samestep.launch(sessions.train, tmp_path, 3, processes=second)
    assert after == pytest.approx(losses[8:])  # with the dropout, the order and the rates of the uninterrupted run


def test_second_start_of_a_finished_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    first, second = [samestep_command("run", "--processes", 2, "script.py", cwd=tmp_path) for _ in range(2)]
    mode = "samestep: script.py on 2 processes: it imports samestep\n"
    assert (first.code, first.out, first.err) == (0, "0\n1\n", mode)
    assert (second.code, second.out) == (0, "")
    assert second.err == mode + "this run is complete: 2 of 2 epochs were trained by earlier starts\n"


@pytest.mark.parametrize(
    ("what", "message"), [("rate", "different state of optimizer"), ("weights", "state of the model")]
)
def test_state_that_differs_between_ranks_is_not_saved(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        samestep.launch(sessions.unequal, tmp_path, what, processes=2)
    assert not CheckpointFolder(tmp_path).steps()


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 1)
    batches = samestep.loader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches


def test_several_models(tmp_path: Path) -> None:
    def manager() -> tuple[dict[str, nn.Module], Any]:
        (first, one, batches), (second, other, _) = parts(), parts()
        models = {"generator": first, "critic": second}
        optimizers = {"generator": one, "critic": other}
        return models, samestep.CheckpointManager(tmp_path, models, batches, optimizer=optimizers)

    with samestep.init(device="cpu"):
        models, checkpoints = manager()
        checkpoints.save()
        del checkpoints
        others, checkpoints = manager()
        assert checkpoints.resume()
        for name, model in models.items():
            assert torch.equal(model.weight, others[name].weight)  # type: ignore[arg-type]


def test_unsuitable_parts_are_refused(tmp_path: Path) -> None:
    model, optimizer, batches = parts()
    with samestep.init(device="cpu"):
        with pytest.raises(InputError, match="no optimizer of the model"):
            samestep.CheckpointManager(tmp_path, model, batches)
        with pytest.raises(InputError, match="parameters that the model does not have"):
            samestep.CheckpointManager(tmp_path, nn.Linear(2, 1), batches, optimizer=optimizer)
        with pytest.raises(InputError, match="no optimizer of the model critic"):
            models = {"critic": model, "other": nn.Linear(1, 1)}
            samestep.CheckpointManager(tmp_path, models, batches, optimizer=optimizer)
