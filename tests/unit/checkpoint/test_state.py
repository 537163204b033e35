"""State in checkpoints: a resumed run has the same bits as an uninterrupted one."""

import json
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pydantic_core
import pytest
import torch
from safetensors.torch import load
from torch import nn
from torch.optim import lr_scheduler

from samestep.checkpoint import state
from samestep.checkpoint.contents import Progress, Training
from samestep.checkpoint.encoding import Tensors, decode, encode
from samestep.checkpoint.state import MODEL, OPTIMIZER, load_model, pack
from samestep.checkpoint.store import STATE, CheckpointFolder
from samestep.cursor import Cursor
from samestep.errors import CheckpointError, InputError

PROGRESS = Progress(
    step=7,
    cursor=Cursor(2, 48),
    best=0.1 + 0.2,
    loss_sum=1 / 3,
    loss_count=48.0,
    recipe={"model": {"name": "net"}, "step": {"seed": 2**64 - 1}},
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler | None]] = {
    "none": lambda o: None,
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "factor": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 6]),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 20)], [3]
    ),
}


class Net(nn.Module):
    """Model with tied weights, batch norm, a frozen layer and buffers of several types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(5, 4)
            self.norm = nn.BatchNorm1d(4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.out = nn.Linear(4, 5)
        self.out.weight = self.embed.weight
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("short", torch.tensor([0.5, 1.5], dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.frozen(self.norm(self.embed(tokens))))


def training(seed: int, optimizer: str = "momentum", scheduler: str = "cosine", scale: bool = False) -> Training:
    model = Net(seed)
    chosen = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    return Training(model, chosen, SCHEDULERS[scheduler](chosen), torch.amp.GradScaler("cpu", enabled=scale))


def advance(run: Training, steps: int) -> None:
    tokens = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    for _ in range(steps):
        run.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(run.model(tokens), tokens)
        run.scaler.scale(loss).backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        if run.scheduler is not None:
            run.scheduler.step()


def saved(folder: Path, run: Training, step: int = 7) -> Path:
    return CheckpointFolder(folder).write(step, pack(run, PROGRESS))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_of_optimizers(tmp_path: Path, optimizer: str) -> None:
    assert_resumes_exactly(tmp_path, optimizer, "cosine", scale=False)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_resume_of_schedulers(tmp_path: Path, scheduler: str) -> None:
    assert_resumes_exactly(tmp_path, "momentum", scheduler, scale=False)


def test_resume_of_a_scaler(tmp_path: Path) -> None:
    assert_resumes_exactly(tmp_path, "adamw", "cosine", scale=True)


def assert_resumes_exactly(folder: Path, optimizer: str, scheduler: str, *, scale: bool) -> None:
    whole, broken = (training(0, optimizer, scheduler, scale) for _ in range(2))
    advance(whole, 9)
    advance(broken, 4)
    path = saved(folder, broken)
    other = training(1, optimizer, scheduler, scale)
    assert state.load(path, other) == PROGRESS
    assert pack(other, PROGRESS) == pack(broken, PROGRESS)
    advance(other, 5)
    assert pack(other, PROGRESS) == pack(whole, PROGRESS)


def test_resume_before_the_first_step(tmp_path: Path) -> None:
    first, other = training(0, "adamw"), training(1, "adamw")
    state.load(saved(tmp_path, first, 0), other)
    advance(first, 3)
    advance(other, 3)
    assert pack(other, PROGRESS) == pack(first, PROGRESS)


def test_packing_does_not_change_the_run_and_files_do_not_change_with_the_model() -> None:
    packed, unpacked = training(0, "amsgrad"), training(0, "amsgrad")
    for run in (packed, unpacked):
        advance(run, 2)
    before = pack(packed, PROGRESS)
    copy = dict(before)
    for run in (packed, unpacked):
        advance(run, 2)
    assert pack(packed, PROGRESS) == pack(unpacked, PROGRESS)
    assert before == copy != pack(packed, PROGRESS)


def test_names_are_those_of_the_model_and_tied_weights_are_stored_once() -> None:
    run = training(0)
    advance(run, 1)
    files = pack(run, PROGRESS)
    assert set(load(files[MODEL])) == set(run.model.state_dict()) - {"out.weight"}
    assert json.loads(files[STATE])["aliases"] == {"out.weight": "embed.weight"}
    trained = {"embed.weight", "norm.weight", "norm.bias", "out.bias"}
    assert set(load(files[OPTIMIZER])) == {f"momentum_buffer/{name}" for name in trained}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    run, other = training(0), training(1)
    state.load(saved(tmp_path, run), other)
    assert other.model.out.weight is other.model.embed.weight
    assert torch.equal(other.model.out.weight, run.model.embed.weight)


def test_tied_weights_load_into_untied_layers(tmp_path: Path) -> None:
    run, other = training(0), Net(1)
    other.out.weight = nn.Parameter(torch.zeros(5, 4))
    load_model(saved(tmp_path, run), other)
    assert torch.equal(other.out.weight, run.model.embed.weight)
    assert other.out.weight is not other.embed.weight


def test_views_of_a_tensor_keep_their_values(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self, start: float) -> None:
            super().__init__()
            whole = torch.arange(start, start + 12).view(4, 3)
            self.register_buffer("whole", whole)
            self.register_buffer("rows", whole[:2])
            self.register_buffer("across", whole.t())
            self.register_buffer("bits", whole.view(torch.int32))

    model = Views(1.0)
    run = Training(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None, torch.amp.GradScaler("cpu"))
    run.optimizer.param_groups[0]["params"] = []
    other = Views(5.0)
    for name in ("rows", "across", "bits"):
        setattr(other, name, getattr(other, name).clone())
    load_model(saved(tmp_path, run), other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(getattr(other, name), tensor), name


def test_every_bit_of_a_tensor_is_preserved(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-0.0, math.nan, 1e-42]]))
    run = Training(model, torch.optim.SGD(model.parameters()), None, torch.amp.GradScaler("cpu", enabled=False))
    load_model(saved(tmp_path, run), other)
    assert torch.equal(other.weight.view(torch.int32), model.weight.view(torch.int32))


@pytest.mark.skipif(sys.platform != "linux", reason="lists the mapped files of a process")
def test_loaded_state_does_not_depend_on_the_file(tmp_path: Path) -> None:
    run, other = training(0, "adamw"), training(1, "adamw")
    advance(run, 2)
    saved_objects = {"tensor": torch.ones(9), "array": numpy.ones(9), "generator": torch.Generator().get_state()}
    objects: dict[str, Any] = {}
    path = saved(tmp_path, replace(run, objects={"values": saved_objects}))
    state.load(path, replace(other, objects={"values": objects}))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    slots = [tensor for values in other.optimizer.state.values() for tensor in values.values()]
    assert slots and all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in slots)
    assert objects["tensor"].sum() == objects["array"].sum() == 9


def test_groups_keep_their_settings(tmp_path: Path) -> None:
    def grouped(seed: int, lr: float) -> Training:
        model = Net(seed)
        groups = [
            {"params": [model.embed.weight], "lr": lr, "betas": (0.5, 0.7)},
            {"params": [*model.norm.parameters(), model.out.bias], "weight_decay": lr},
        ]
        return Training(model, torch.optim.AdamW(groups, lr=2 * lr), None, torch.amp.GradScaler("cpu", enabled=False))

    run, other = grouped(0, 0.25), grouped(1, 0.5)
    advance(run, 2)
    state.load(saved(tmp_path, run), other)
    for group, loaded in zip(run.optimizer.param_groups, other.optimizer.param_groups, strict=True):
        for key in ("lr", "weight_decay"):
            assert group[key] == loaded[key]
        assert tuple(group["betas"]) == tuple(loaded["betas"])
    advance(run, 2)
    advance(other, 2)
    assert pack(run, PROGRESS)[MODEL] == pack(other, PROGRESS)[MODEL]


class EverySecondStep(torch.optim.SGD):
    """Optimizer that updates parameters every second step, with plain numbers as state."""

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["calls"] = state.get("calls", 0) + 1
            state["rate"] = state.get("rate", 0.1) / 3
            state["moved"] = state["calls"] % 2 == 0
            if state["moved"]:
                parameter.data -= state["rate"] * parameter.grad


def with_names(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([(name, p) for name, p in model.named_parameters() if p.requires_grad])


def with_plain_numbers(model: nn.Module) -> torch.optim.Optimizer:
    return EverySecondStep([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("optimizer_of", [with_names, with_plain_numbers])
def test_resume_of_an_optimizer(tmp_path: Path, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    def begun(seed: int) -> Training:
        model = Net(seed)
        return Training(model, optimizer_of(model), None, torch.amp.GradScaler("cpu", enabled=False))

    run, other = begun(0), begun(1)
    advance(run, 3)
    state.load(saved(tmp_path, run), other)
    advance(run, 3)
    advance(other, 3)
    assert pack(other, PROGRESS) == pack(run, PROGRESS)


@pytest.mark.parametrize("best", [None, -math.inf, math.inf, 1e-300])
def test_progress_is_preserved(tmp_path: Path, best: float | None) -> None:
    progress = Progress(step=3, cursor=Cursor(0, 24), best=best, recipe={"text": "Ü \u2028", "list": [1, None, True]})
    path = CheckpointFolder(tmp_path).write(3, pack(training(0), progress))
    assert state.load(path, training(1)) == progress


# --- values that JSON does not have ---------------------------------------------------------------------


VALUES: dict[str, Any] = {
    "keys": {1: "a", "1": "b", None: 2.5, (1, ("x",)): True, False: {}},
    "containers": [
        (),
        (1, [2]),
        {2, 1},
        frozenset({"a"}),
        deque([1], maxlen=2),
        OrderedDict(b=1, a=2),
        Counter({3: 4}),
    ],
    "scalars": [b"\x00\xff", 2 - 3j, math.inf, -0.0, 5e-324, 2**200, None],
    "an encoded value": {"$type": "tuple", "items": [1]},
    "text": ["\x00\U0001f600", "caf\udce9.jpg", "\ud83d\ude00", {"caf\udce9.jpg": 1}],
    "numpy": [numpy.float32(0.1), numpy.float64(0.1), numpy.bool_(True), numpy.arange(3, dtype=numpy.uint16)],
    "tensors": {"a.b": torch.ones(2, 3).t(), "a": {"b": torch.tensor(1)}, 3: torch.empty(0, dtype=torch.bfloat16)},
}


def through_json(value: Any) -> Any:
    tensors: Tensors = {}
    encoded = pydantic_core.from_json(json.dumps(encode(value, tensors, "value")))  # the parser of `load`
    return decode(encoded, dict(tensors.values()), torch.device("cpu"))


@pytest.mark.parametrize("name", VALUES)
def test_values_are_restored_with_their_types(name: str) -> None:
    result = through_json(VALUES[name])
    assert repr(result) == repr(VALUES[name])


def test_a_tensor_that_is_referred_to_twice_is_one_tensor() -> None:
    tensor = torch.ones(3)
    first, second = through_json((tensor, [tensor]))[0], through_json((tensor, tensor))
    assert torch.equal(first, tensor)
    assert second[0] is second[1]


class Special(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "value",
    [len, object(), Special(), Path("a"), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128), slice(2)],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^place\.a\.0 is of type") as raised:
        encode({"a": (value,)}, {}, "place")
    assert raised.value.code == "E_CHECKPOINT_WRITE"


@pytest.mark.parametrize(
    "forged",
    [
        {"$type": "function", "items": []},
        {"$type": "tuple"},
        {"$type": "tuple", "items": 3},
        {"$type": "dict", "items": [[[], 1]]},
        {"$type": "dict", "items": [1]},
        {"$type": "tensor", "name": "no such tensor"},
        {"$type": "bytes", "items": [300]},
        {"$type": []},
    ],
    ids=str,
)
def test_forged_values_are_refused(forged: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode([forged], {}, torch.device("cpu"))


def test_state_tensors_keep_their_type(tmp_path: Path) -> None:
    def in_bfloat16(seed: int) -> Training:
        model = Net(seed)
        model.embed.to(torch.bfloat16)
        model.out.weight = nn.Parameter(model.out.weight.detach().float())
        return Training(
            model, torch.optim.NAdam([model.embed.weight]), None, torch.amp.GradScaler("cpu", enabled=False)
        )

    run, other = in_bfloat16(0), in_bfloat16(1)
    run.model.embed.weight.grad = torch.ones_like(run.model.embed.weight)
    run.optimizer.step()
    state.load(saved(tmp_path, run), other)
    types = [
        {slot: value.dtype for slot, value in one.optimizer.state[one.model.embed.weight].items()}
        for one in (run, other)
    ]
    assert types[0] == types[1]
    assert types[0]["mu_product"] is torch.float32


# --- errors ---------------------------------------------------------------------------------------------


class Wider(Net):
    def __init__(self) -> None:
        super().__init__(0)
        self.out = nn.Linear(4, 6)
        self.more = nn.Linear(2, 2)


def test_checkpoint_of_another_model_raises(tmp_path: Path) -> None:
    path, other = saved(tmp_path, training(0)), Wider()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        load_model(path, other)
    assert raised.value.code == "E_RESUME_CHANGED"
    assert "4 tensors missing or of another shape or type (out.weight, out.bias, more.weight)" in raised.value.value
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_checkpoint_of_a_larger_model_raises(tmp_path: Path) -> None:
    model = Wider()
    optimizer = torch.optim.SGD(p for p in model.parameters() if p.requires_grad)
    path = saved(tmp_path, Training(model, optimizer, None, torch.amp.GradScaler("cpu", enabled=False)))
    with pytest.raises(CheckpointError, match=r"2 unknown \(more.bias, more.weight\)"):
        load_model(path, Net(0))


def in_two_groups(model: Net) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD([{"params": trained[:1]}, {"params": trained[1:]}], lr=0.1, momentum=0.9)


def with_fewer_layers(model: Net) -> torch.optim.Optimizer:
    model.norm.requires_grad_(False)
    return OPTIMIZERS["momentum"]([p for p in model.parameters() if p.requires_grad])


def of_another_kind(model: Net) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("optimizer", [in_two_groups, with_fewer_layers, of_another_kind])
@pytest.mark.parametrize("written", ["sgd", "momentum"])
def test_checkpoint_of_another_optimizer_raises(
    tmp_path: Path, written: str, optimizer: Callable[[Net], torch.optim.Optimizer]
) -> None:
    run, model = training(0, written), Net(1)
    advance(run, 2)
    other = Training(model, optimizer(model), None, torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(CheckpointError):
        state.load(saved(tmp_path, run), other)


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    run, other = training(0), training(1)
    advance(run, 2)
    path = saved(tmp_path, run)
    data = bytearray((path / OPTIMIZER).read_bytes())
    data[-1] ^= 1
    (path / OPTIMIZER).write_bytes(data)
    before = pack(other, PROGRESS)
    with pytest.raises(CheckpointError):
        state.load(path, other)
    assert pack(other, PROGRESS) == before
