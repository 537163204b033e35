"""A resumption differs from the run before only with a word, and a refused one changes nothing."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import Dataset, TensorDataset

import samestep
from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import InputError, SamestepError
from samestep.launcher.failure import RankError

INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


class Loop:
    """Objects of a plain loop with a checkpoint manager."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        kind: type[torch.optim.Optimizer] = torch.optim.SGD,
        schedule: Schedule | None = None,
        data: Any = None,
        state: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(6, 4)
        self.optimizer = kind(self.model.parameters(), **{"lr": 0.1, **options})  # type: ignore[call-arg]
        self.schedule = schedule and schedule(self.optimizer)
        data = TensorDataset(INPUTS, INPUTS[:, :4].argmax(1)) if data is None else data
        self.batches = samestep.loader(data, batch_size=8, shuffle=True)
        self.state = state or {}
        self.checkpoints = samestep.CheckpointManager(
            folder, self.model, self.batches, optimizer=self.optimizer, scheduler=self.schedule, state=state
        )

    def train(self, epochs: int, *, by_batch: bool = False) -> list[float]:
        rates = []
        for _ in self.checkpoints.epochs(epochs):
            for rows, targets in self.batches:
                rates.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(rows), targets).backward()
                self.optimizer.step()
                if by_batch and self.schedule:
                    self.schedule.step()
            if self.schedule and not by_batch:
                self.schedule.step(*[1.0][: isinstance(self.schedule, ReduceLROnPlateau)])
        return rates

    def facts(self) -> list[Any]:
        """Return the state, to be compared by `str`."""
        objects = [one.state_dict() for one in (self.model, self.optimizer, self.schedule) if one]
        others = [getattr(one, "state_dict", lambda one=one: one)() for one in self.state.values()]
        return [str(objects), str(others), self.batches.cursor]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with samestep.init(device="cpu"):
        yield


def before(folder: Path, **options: Any) -> Loop:
    """Train two epochs, and release the folder."""
    loop = Loop(folder, **options)
    loop.train(2)
    return loop


def refused(loop: Loop, *names: str) -> None:
    """A resumption names the differences with both values, and changes nothing."""
    facts = loop.facts()
    with pytest.raises(SamestepError) as error:
        loop.checkpoints.resume()
    assert error.value.code == "E_RESUME_CHANGED"
    for name in names:
        assert name in error.value.value
    assert loop.facts() == facts


class Table(Dataset[Any]):
    """Samples with augmentation, from a list that can have another order."""

    def __init__(self, order: list[int], first: int = 0) -> None:
        self.order = order
        self.first = first

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = INPUTS[self.order[index]] + 0.01 * torch.randn(6)
        return row, self.first + int(row[:4].argmax())


ORDER = list(range(40))
OTHER_DATA: dict[str, tuple[Any, Any]] = {
    "another order": (Table(ORDER), Table(ORDER[::-1])),
    "other targets": (Table(ORDER), Table(ORDER, first=1)),
    "other rows": (TensorDataset(INPUTS, torch.zeros(40).long()), TensorDataset(INPUTS * 2, torch.zeros(40).long())),
}


@pytest.mark.parametrize("name", OTHER_DATA)
def test_other_samples_under_the_same_indices(tmp_path: Path, name: str) -> None:
    data, other = OTHER_DATA[name]
    run = before(tmp_path, data=data)
    del run
    assert Loop(tmp_path, data=data, seed=1).checkpoints.resume()  # the same samples, augmented alike
    refused(Loop(tmp_path, data=other, seed=1), "other contents of samples")
    assert Loop(tmp_path, data=other).checkpoints.resume(accept_changes=True)


class Refusing:
    """Object that fails after it has taken a part of a state."""

    def __init__(self, version: int, *, is_broken: bool = False) -> None:
        self.values = {"version": version}
        self.is_broken = is_broken

    def state_dict(self) -> dict[str, int]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.values.update(state)
        if self.is_broken and state["version"] == 1:
            raise ValueError("half of the state is loaded")


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "another optimizer": ({}, {"kind": torch.optim.AdamW}, ()),
    "momentum": ({"momentum": 0.5}, {"momentum": 0.9}, ("momentum is 0.9, and was 0.5",)),
    "weight decay": ({}, {"weight_decay": 0.1}, ("weight_decay is 0.1, and was 0",)),
    "rate": ({}, {"lr": 0.02}, ("lr is 0.02, and was 0.1",)),
    "length": (
        {"schedule": lambda one: CosineAnnealingLR(one, 2)},
        {"schedule": lambda one: CosineAnnealingLR(one, 4)},
        ("T_max is 4, and was 2",),
    ),
    "another schedule": (
        {"schedule": lambda one: StepLR(one, 1)},
        {"schedule": lambda one: CosineAnnealingLR(one, 4)},
        (),
    ),
    "patience": (
        {"schedule": lambda one: ReduceLROnPlateau(one, patience=1)},
        {"schedule": lambda one: ReduceLROnPlateau(one, patience=7)},
        ("patience is 7, and was 1",),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_other_settings_are_refused_and_nothing_changes(tmp_path: Path, name: str) -> None:
    old, new, texts = CHANGED[name]
    run = before(tmp_path, **old)
    del run
    refused(Loop(tmp_path, seed=1, **new), *texts)


def test_objects_that_refuse_leave_everything_as_it_was(tmp_path: Path) -> None:
    state = {"average": nn.Linear(2, 1), "counts": {"seen": 1}, "last": Refusing(1)}
    run = before(tmp_path, schedule=lambda one: StepLR(one, 1), state=state)
    del run
    present = {"average": nn.Linear(2, 1), "counts": {"seen": 7}, "last": Refusing(2, is_broken=True)}
    loop = Loop(tmp_path, seed=1, schedule=lambda one: StepLR(one, 1), state=present)
    facts = loop.facts()
    with pytest.raises(SamestepError, match="half of the state"):
        loop.checkpoints.resume()
    assert loop.facts() == facts


def chained(optimizer: torch.optim.Optimizer, length: int) -> LRScheduler:
    warmup = LinearLR(optimizer, total_iters=2)
    return SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, length)], [2])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (lambda one: CosineAnnealingLR(one, 2), lambda one: CosineAnnealingLR(one, 4)),
        (lambda one: chained(one, 4), lambda one: chained(one, 9)),
        (lambda one: OneCycleLR(one, 0.1, total_steps=4), lambda one: OneCycleLR(one, 0.3, total_steps=8)),
    ],
)
def test_accepted_schedules_are_those_of_the_script(tmp_path: Path, old: Schedule, new: Schedule) -> None:
    """Its rates are those of a run with the new schedule from the beginning."""
    whole = Loop(tmp_path / "whole", schedule=new, lr=0.02).train(4)
    run = before(tmp_path / "run", schedule=old)
    del run
    loop = Loop(tmp_path / "run", schedule=new, lr=0.02)
    assert loop.checkpoints.resume(accept_changes=True)
    steps = len(loop.batches) * 2
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(whole[steps])
    loop.checkpoints.save()
    assert loop.checkpoints.resume()  # the accepted settings are those of the next checkpoint


def test_accepted_settings_of_an_optimizer(tmp_path: Path) -> None:
    run = before(tmp_path, momentum=0.5)
    buffers = str(run.optimizer.state_dict()["state"])
    del run
    loop = Loop(tmp_path, momentum=0.9, weight_decay=0.1)
    assert loop.checkpoints.resume(accept_changes=True)
    group = loop.optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["lr"]) == (0.9, 0.1, 0.1)
    assert str(loop.optimizer.state_dict()["state"]) == buffers


def averaged(updates: int, **others: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 1))
    model.updates = updates  # type: ignore[assignment]
    for name, value in others.items():
        setattr(model[0], name, value)
    return model


def test_attributes_outside_of_the_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"ema": averaged(10, history=[1, 2], center=torch.ones(2), decay=0.9)}
    run = before(tmp_path, state=state)
    del run
    caplog.set_level(logging.WARNING)
    now = {"ema": averaged(0, history=[], center=torch.zeros(2), decay=0.9)}
    assert Loop(tmp_path, state=now).checkpoints.resume()
    named = [name for name in ("updates", "history", "center", "decay") if name in caplog.text]
    assert named == ["updates", "history", "center"]
    assert "updates is 0, and was 10" in caplog.text
    caplog.clear()
    same = {"ema": averaged(10, history=[1, 2], center=torch.ones(2), decay=0.9)}
    assert Loop(tmp_path, state=same).checkpoints.resume()
    assert not caplog.text


def test_another_machine_is_noted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = before(tmp_path)
    del run
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert Loop(tmp_path).checkpoints.resume()
    assert caplog.text.count("ANOTHER") == 1
    assert "torch is 0.0.1" in caplog.text


@pytest.mark.parametrize("name", ["scheduler", "optimizer", "extra"])
def test_names_of_objects_hide_nothing(tmp_path: Path, name: str) -> None:
    loop = Loop(tmp_path, state={name: {"value": 1}}, schedule=lambda one: StepLR(one, 1))
    loop.optimizer.step()  # before that of the schedule
    hashes = loop.checkpoints._hashes()
    for change in (loop.schedule.step, lambda: loop.state[name].update(value=2)):  # type: ignore[union-attr]
        change()
        changed = loop.checkpoints._hashes()
        assert changed != hashes
        hashes = changed


class Odd(torch.optim.SGD):
    """Optimizer with state that a checkpoint cannot hold."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["function"] = object()


def test_known_before_the_end_of_the_first_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path / "odd", kind=Odd)
    with pytest.raises(InputError) as error:
        loop.train(1)
    assert error.value.code == "E_CHECKPOINT_WRITE"
    assert loop.batches.cursor.samples == 8  # after the first step
    caplog.set_level(logging.WARNING)
    short = Loop(tmp_path / "cycle", schedule=lambda one: OneCycleLR(one, 0.1, total_steps=7))
    with pytest.raises(ValueError, match="Tried to step"):
        short.train(2, by_batch=True)
    assert "OneCycleLR has 7 steps" in caplog.text
    caplog.clear()
    Loop(tmp_path / "right", schedule=lambda one: OneCycleLR(one, 0.1, total_steps=10)).train(2, by_batch=True)
    Loop(tmp_path / "epochs", schedule=lambda one: OneCycleLR(one, 0.1, total_steps=3)).train(2)
    assert not caplog.text
    single = Loop(tmp_path / "single", data=TensorDataset(INPUTS[:33], torch.zeros(33).long()))
    single.model.norm = nn.BatchNorm1d(4)  # type: ignore[assignment]
    next(single.checkpoints.epochs(1))
    assert "drop_last" in caplog.text


def folders_of_ranks(folder: Path) -> None:
    world = samestep.init(device="cpu")
    with pytest.raises(SamestepError) as error:
        Loop(folder / str(world.rank))
    assert error.value.code == "E_RANK_MISMATCH"
    assert str(folder / "1") in error.value.value
    same = Loop(folder / "same")
    same.train(1)
    same.checkpoints._folder = CheckpointFolder(folder / ("same" if world.is_main else "gone"), 2)
    with pytest.raises(SamestepError) as error:
        same.checkpoints.resume()
    assert "no checkpoint" in error.value.value
    with pytest.raises(ValueError, match="on every rank"), samestep.main_first():
        raise ValueError("on every rank")
    with samestep.main_first():
        with samestep.main_first():
            (folder / "order").open("a").write("a")
        (folder / "order").open("a").write("b")
    samestep.all_gather(0)
    assert (folder / "order").read_text() == "abab"
    if world.is_main:
        with pytest.raises(ValueError, match="on rank 0"), samestep.main_first():
            raise ValueError("on rank 0")
    else:
        with pytest.raises(SamestepError) as error, samestep.main_first():
            pass
        assert error.value.code == "E_RANK_DESYNC"


@pytest.mark.slow
def test_folders_of_ranks_and_blocks_of_rank_0_first(tmp_path: Path) -> None:
    samestep.launch(folders_of_ranks, tmp_path, processes=2)
    with pytest.raises(RankError):
        samestep.launch(saves_on_one_rank, tmp_path, processes=2)
    samestep.launch(saves_on_all_ranks, tmp_path, processes=2)


def divided() -> nn.Module:
    torch.manual_seed(0)
    return samestep.parallel(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)), strategy="fsdp")


def saves_on_one_rank(folder: Path) -> None:
    model = divided()
    if samestep.is_main():
        torch.save(model.state_dict(), folder / "half.pt")


def saves_on_all_ranks(folder: Path) -> None:
    model = divided()
    torch.save(model.state_dict(), folder / f"all-{samestep.init().rank}.pt")
    full = samestep.full_state_dict(model)
    for rank in range(2):
        saved = torch.load(folder / f"all-{rank}.pt", weights_only=True)
        assert all(type(value) is torch.Tensor and torch.equal(value, full[name]) for name, value in saved.items())
