"""Forged checkpoints, whose manifest matches: each value is checked before it is used, and refused as invalid input."""

import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR

from helpers.surroundings import RecordFault, require_bounded
from helpers.system import here
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.manifest import MANIFEST
from samestep.checkpoint.state import AVERAGE, MODEL, OPTIMIZER, Training, pack
from samestep.checkpoint.state import load as load_checkpoint
from samestep.checkpoint.store import STATE, CheckpointFolder
from samestep.errors import EXIT_INPUT, CheckpointError
from samestep.microbatches import Cursor

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
EXPECTED = "input error"
NESTED: Any = []
for _ in range(150):
    NESTED = [NESTED]
VALUES = (None, True, -1, 10**30, math.nan, math.inf, "x", [], {"x": {"y": []}}, NESTED)
Files = dict[str, bytes]
OptimizerClass = Callable[..., torch.optim.Optimizer]
Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


def training(
    optimizer: OptimizerClass = torch.optim.AdamW,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
) -> Training:
    """Return a model with batch norm and tied weights after two steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    parameters = optimizer(model.parameters(), lr=0.01)
    schedule = schedule or (lambda own: OneCycleLR(own, 0.1, total_steps=50))
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    run = Training(model, parameters, schedule(parameters), scaler, average)
    for _ in range(2):
        step(run)
    return run


def step(run: Training) -> None:
    run.optimizer.zero_grad()
    run.scaler.scale(run.model(torch.arange(12.0).view(3, 4).sin()).square().mean()).backward()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert run.scheduler is not None
    run.scheduler.step()


@pytest.fixture(scope="module")
def files() -> Files:
    return pack(training(), Progress(step=2, cursor=Cursor(0, 6), best=0.5, loss_sum=1.0, loss_count=6.0))


def require_refused(forged: Files, folder: Path, run: Training | None = None) -> None:
    """Require that a checkpoint is refused as invalid input, with a bounded report."""
    with pytest.raises(CheckpointError) as raised:
        load_forged(forged, folder, run)
    assert raised.value.exit_code == EXIT_INPUT
    require_bounded(f"error: {raised.value}")


def load_forged(forged: Files, folder: Path, run: Training | None = None) -> Training:
    run = run or training()
    for name, data in forged.items():
        (folder / name).write_bytes(data)
    write_manifest(folder, {"format": 1, "files": {name: entry(data) for name, data in forged.items()}})
    load_checkpoint(folder, run)
    return run


def entry(data: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def write_manifest(folder: Path, manifest: Any) -> None:
    """Write a manifest with its own matching SHA-256."""
    if isinstance(manifest, dict):
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        manifest = {**manifest, "sha256": digest}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of every value in JSON data."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*place, key))


def replaced(data: Any, place: tuple[str | int, ...], value: Any) -> Any:
    if not place:
        return value
    data = copy.deepcopy(data)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return data


@pytest.mark.long
def test_every_value_of_the_state_is_checked(tmp_path: Path, record_fault: RecordFault) -> None:
    run = training(schedule=lambda own: MultiStepLR(own, [3, 4]))
    files = pack(run, Progress(step=2, cursor=Cursor(0, 6), best=0.5, loss_sum=1.0, loss_count=6.0))
    state = json.loads(files[STATE])
    refused = accepted = 0
    for place in places({**state, "sources": {}}):
        for value in VALUES:
            forged = {**files, STATE: json.dumps(replaced(state, place, value)).encode()}
            try:
                load_forged(forged, tmp_path, run)
            except CheckpointError as error:
                require_bounded(f"error: {error}")
                refused += 1
            else:
                step(run)  # a value that is accepted must not fail later
                accepted += 1
            run.optimizer.state.clear()
    assert refused > 8 * accepted
    record_fault("each value of state.json is replaced by 10 others, with a matching manifest", EXPECTED, "exit code 2")


REFUSED: list[tuple[tuple[str | int, ...], Any]] = [
    (("progress", "step"), -1),
    (("progress", "step"), 2.5),
    (("progress", "step"), 10**30),
    (("progress", "cursor", "epoch"), -1),
    (("progress", "cursor", "samples"), -(10**12)),
    (("progress", "loss_sum"), math.nan),
    (("progress", "loss_count"), -1.0),
    (("progress", "recipe"), []),
    (("optimizer", "groups", 0, "lr"), math.nan),
    (("optimizer", "groups", 0, "lr"), -1.0),
    (("optimizer", "groups", 0, "betas"), [2.0, 3.0]),
    (("optimizer", "groups", 0, "betas"), [0.9]),
    (("optimizer", "groups", 0, "eps"), "small"),
    (("optimizer", "groups", 0, "params"), []),
    (("optimizer", "numbers"), {"other": {"step": 1}}),
    (("optimizer", "numbers"), {"0.weight": {"exp_avg": None}}),
    (("scheduler", "last_epoch"), "two"),
    (("scheduler", "step"), 3),
    (("scheduler", "base_momentums"), [0.9, 0.9]),
    (("scaler", "scale"), None),
    (("scaler", "unknown"), 1),
    (("aliases", "2.weight"), "no such tensor"),
    (("sources",), {"my_model": "short"}),
    (("unknown",), 1),
    (("optimizer", "groups", 0, "lr"), {"$type": "tensor", "name": "no such tensor"}),
    (("optimizer", "groups", 0, "betas"), {"$type": "set", "items": [0.9, 0.99]}),
    (("optimizer", "groups", 0, "eps"), {"$type": "complex", "items": [1.0, 0.0]}),
    (("optimizer", "shared"), [["calls", 1]]),
    (("scheduler", "base_lrs"), {"$type": "deque", "items": [[0.1], 10**30]}),
    (("scheduler", "last_epoch"), {"$type": "function", "items": []}),
    (("extra",), {"0._extra_state": 1}),
    (("objects",), {"average": {}}),
]


@pytest.mark.parametrize(("place", "value"), REFUSED, ids=lambda part: str(part)[:40])
def test_a_value_out_of_range_is_refused(
    files: Files, tmp_path: Path, place: tuple[str | int, ...], value: Any
) -> None:
    require_refused({**files, STATE: json.dumps(replaced(json.loads(files[STATE]), place, value)).encode()}, tmp_path)


def changed_tensors(data: bytes) -> Iterator[bytes]:
    """Yield the file with each tensor of another shape or type, missing, or under another name."""
    tensors = load(data)
    for name, tensor in tensors.items():
        others = {key: value for key, value in tensors.items() if key != name}
        yield save(others)
        yield save({**others, f"{name}.other": tensor})
        yield save({**others, name: torch.zeros((3, *tensor.shape))})
        yield save({**others, name: torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]])})
        yield save({**others, name: torch.zeros(0)})
        yield save({**others, name: torch.zeros(tensor.shape, dtype=torch.complex64)})
        yield save({**others, name: torch.zeros(tensor.shape, dtype=torch.bool)})
    yield save({**tensors, "other": torch.zeros(2)})
    yield save({**tensors, "exp_avg/other": torch.zeros(2)})
    yield b""
    yield data[: len(data) // 2]
    yield (2**62).to_bytes(8, "little") + data[8:]


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, AVERAGE])
def test_every_tensor_is_checked(files: Files, tmp_path: Path, name: str, record_fault: RecordFault) -> None:
    run = training()
    for data in changed_tensors(files[name]):
        require_refused({**files, name: data}, tmp_path, run)
    record_fault(f"tensors of {name} have other shapes or types, are missing or additional", EXPECTED, "exit code 2")


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam],
    ids=lambda kind: kind.__name__,
)
def test_state_of_other_optimizers_is_checked(tmp_path: Path, optimizer: OptimizerClass) -> None:
    def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return optimizer(parameters, lr=lr, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))

    def make() -> Training:
        return training(momentum, lambda own: MultiStepLR(own, [3, 4]))

    files = pack(make(), Progress(step=2))
    run = load_forged(files, tmp_path, make())
    own = make()
    for _ in range(3):
        step(run)
        step(own)
    assert all(torch.equal(*pair) for pair in zip(run.model.parameters(), own.model.parameters(), strict=True))
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**2), "the milestones were lost"
    if optimizer is torch.optim.SGD:
        return  # a parameter without momentum may have had no gradient
    for data in changed_tensors(files[OPTIMIZER]):
        require_refused({**files, OPTIMIZER: data}, tmp_path, own)


def test_every_value_of_the_manifest_is_checked(files: Files, tmp_path: Path, record_fault: RecordFault) -> None:
    path = CheckpointFolder(tmp_path).write(2, files)
    manifest = json.loads((path / MANIFEST).read_bytes())
    del manifest["sha256"]
    run = training()
    for place in places(manifest):
        for value in VALUES:
            write_manifest(path, replaced(manifest, place, value))
            with pytest.raises(CheckpointError) as raised:
                load_checkpoint(path, run)
            assert raised.value.exit_code == EXIT_INPUT
    record_fault("each value of manifest.json is replaced by 10 others", EXPECTED, "exit code 2")


@pytest.mark.parametrize("name", [MODEL, STATE, MANIFEST])
def test_a_sparse_file_of_1_tib_is_refused_at_once(
    files: Files, tmp_path: Path, name: str, record_fault: RecordFault
) -> None:
    path = CheckpointFolder(tmp_path).write(2, files)
    manifest = json.loads((path / MANIFEST).read_bytes())
    del manifest["sha256"]
    if name != MANIFEST:
        manifest["files"][name] = {"bytes": 2**40, "sha256": "0" * 64}
        write_manifest(path, manifest)
    os.truncate(path / name, 2**40)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path, training())
    assert time.process_time() - began < 2
    record_fault(f"{name} is a sparse file of 1 TiB", EXPECTED, "exit code 2 within 2 s")


@pytest.mark.long
def test_resume_of_forged_checkpoints_is_an_input_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "runs/a"
    assert here("train", RECIPE, "--name", "a", "--set", "epochs=1", cwd=tmp_path) == 0
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.find("last")
    content = {name: (path / name).read_bytes() for name in (MODEL, OPTIMIZER, STATE)}
    state = json.loads(content[STATE])
    forgeries = [
        {OPTIMIZER: save({name: torch.zeros(7) for name in load(content[OPTIMIZER])})},
        {STATE: json.dumps(replaced(state, ("progress", "cursor", "samples"), 10**9)).encode()},
        {STATE: json.dumps(replaced(state, ("progress", "recipe", "batch_size"), "many")).encode()},
    ]
    for forgery in forgeries:
        folder.write(13, {**content, **forgery})
        capsys.readouterr()
        assert here("resume", run, "--set", "epochs=2", cwd=tmp_path) == EXIT_INPUT
        report = capsys.readouterr().err
        assert report.count("error: ") == 1
        require_bounded(report)
    folder.write(13, content)
    assert here("resume", run, "--set", "epochs=2", cwd=tmp_path) == 0
