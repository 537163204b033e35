"""Forged checkpoints, whose manifest matches: contents that do not fit are refused as invalid input."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

from helpers.surroundings import RecordFault, require_bounded
from helpers.system import here
from samestep.checkpoint.contents import Progress, Training
from samestep.checkpoint.state import AVERAGE, MODEL, OPTIMIZER, pack
from samestep.checkpoint.state import load as load_checkpoint
from samestep.checkpoint.store import STATE, CheckpointFolder
from samestep.cursor import Cursor
from samestep.errors import EXIT_INPUT, CheckpointError

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
Files = dict[str, bytes]
Place = tuple[str | int, ...]


def training() -> Training:
    """Return a model with batch norm and tied weights after two steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=50)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run = Training(model, optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=2.0), average)
    for _ in range(2):
        optimizer.zero_grad()
        run.scaler.scale(model(torch.arange(12.0).view(3, 4).sin()).square().mean()).backward()
        run.scaler.step(optimizer)
        run.scaler.update()
        scheduler.step()
    return run


@pytest.fixture(scope="module")
def files() -> Files:
    return pack(training(), Progress(step=2, cursor=Cursor(0, 6), best=0.5, loss_sum=1.0, loss_count=6.0))


def refusal(forged: Files, folder: Path, run: Training | None = None) -> CheckpointError:
    """Return the error of a checkpoint with a matching manifest; its report is bounded."""
    path = CheckpointFolder(folder).write(2, forged)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path, run or training())
    assert raised.value.exit_code == EXIT_INPUT
    require_bounded(f"error: {raised.value}")
    return raised.value


def replaced(data: Any, place: Place, value: Any) -> Any:
    data = copy.deepcopy(data)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return data


REFUSED: list[tuple[Place, Any, str]] = [
    (("progress", "step"), -1, "E_CHECKPOINT"),
    (("progress", "step"), 2.5, "E_CHECKPOINT"),
    (("progress", "cursor", "samples"), -(10**12), "E_CHECKPOINT"),
    (("progress", "loss_sum"), math.nan, "E_CHECKPOINT"),
    (("progress", "recipe"), [], "E_CHECKPOINT"),
    (("sources",), {"my_model": "short"}, "E_CHECKPOINT"),
    (("unknown",), 1, "E_CHECKPOINT"),
    (("optimizer", "groups", 0, "params"), [], "E_RESUME_CHANGED"),
    (("optimizer", "groups", 0), {"params": [], "lr": 0.1}, "E_RESUME_CHANGED"),
    (("optimizer", "numbers"), {"other": {"step": 1}}, "E_RESUME_CHANGED"),
    (("optimizer", "groups", 0, "lr"), {"$type": "tensor", "name": "no such tensor"}, "E_CHECKPOINT"),
    (("scheduler", "step"), 3, "E_RESUME_CHANGED"),
    (("scheduler", "base_lrs"), {"$type": "deque", "items": [[0.1], 10**30]}, "E_CHECKPOINT"),
    (("scheduler", "last_epoch"), {"$type": "function", "items": []}, "E_CHECKPOINT"),
    (("aliases", "2.weight"), "no such tensor", "E_CHECKPOINT"),
    (("extra",), {"0._extra_state": 1}, "E_RESUME_CHANGED"),
    (("objects",), {"average": {}}, "E_RESUME_CHANGED"),
]


@pytest.mark.parametrize(("place", "value", "code"), REFUSED, ids=lambda part: str(part)[:40])
def test_a_value_that_does_not_fit_is_refused(
    files: Files, tmp_path: Path, place: Place, value: Any, code: str
) -> None:
    forged = {**files, STATE: json.dumps(replaced(json.loads(files[STATE]), place, value)).encode()}
    assert refusal(forged, tmp_path).code == code


def test_the_state_of_another_schedule_is_refused(files: Files, tmp_path: Path) -> None:
    run = training()
    other = Training(run.model, run.optimizer, MultiStepLR(run.optimizer, [3]), run.scaler, run.average)
    assert refusal(files, tmp_path, other).code == "E_RESUME_CHANGED"


def changed_tensors(data: bytes) -> Iterator[bytes]:
    """Yield the file with each tensor of another shape or type, missing, or under another name."""
    tensors = load(data)
    for name, tensor in tensors.items():
        others = {key: value for key, value in tensors.items() if key != name}
        yield save(others)
        yield save({**others, f"{name}.other": tensor})
        yield save({**others, name: torch.zeros((3, *tensor.shape))})
        yield save({**others, name: torch.zeros(tensor.shape, dtype=torch.bool)})
    yield save({**tensors, "other": torch.zeros(2)})


@pytest.mark.parametrize("name", [MODEL, AVERAGE])
def test_every_tensor_of_the_weights_is_checked(
    files: Files, tmp_path: Path, name: str, record_fault: RecordFault
) -> None:
    run = training()
    for data in changed_tensors(files[name]):
        refusal({**files, name: data}, tmp_path, run)
    record_fault(f"tensors of {name} have other shapes or types, are missing or additional", "exit code 2")


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, AVERAGE])
def test_a_file_without_tensors_is_refused(files: Files, tmp_path: Path, name: str) -> None:
    data = files[name]
    for broken in (b"", data[: len(data) // 2], (2**62).to_bytes(8, "little") + data[8:]):
        assert refusal({**files, name: broken}, tmp_path).code == "E_CHECKPOINT"


@pytest.mark.long
def test_resume_of_forged_checkpoints_is_an_input_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "runs/a"
    assert here("train", RECIPE, "--name", "a", "epochs=1", cwd=tmp_path) == 0
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.find("last")
    content = {name: (path / name).read_bytes() for name in (MODEL, OPTIMIZER, STATE)}
    state = json.loads(content[STATE])
    forgeries = [
        {OPTIMIZER: save({f"{name}.other": torch.zeros(7) for name in load(content[OPTIMIZER])})},
        {STATE: json.dumps(replaced(state, ("progress", "cursor", "samples"), 10**9)).encode()},
        {STATE: json.dumps(replaced(state, ("progress", "recipe", "batch_size"), "many")).encode()},
    ]
    for forgery in forgeries:
        folder.write(13, {**content, **forgery})
        capsys.readouterr()
        assert here("resume", run, "epochs=2", cwd=tmp_path) == EXIT_INPUT
        report = capsys.readouterr().err
        assert report.count("error: ") == 1
        require_bounded(report)
    folder.write(13, content)
    assert here("resume", run, "epochs=2", cwd=tmp_path) == 0
