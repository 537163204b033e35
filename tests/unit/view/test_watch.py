"""Watched calls: a reason for each side door, and none for other code."""

from __future__ import annotations

import array as array_module
import collections
import contextvars
import functools
import itertools
import logging
import queue as queues
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from samestep.view import operations
from samestep.view import watch as watch_module
from samestep.view.watch import Watched, watch

ROWS = 6


def call(module: nn.Module, *arguments: Any, **options: Any) -> Watched:
    return watch(module, lambda: module(*arguments, **options), arguments, options)


def data(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """One linear layer; its output passes through a function of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.layer(x))

    def after(self, x: Tensor) -> Any:
        return x.relu()


# ----- state outside of the module -----------------------------------------------------------------------------------

steps = 0
history: list[float] = []
settings = {"scale": 2.0}
table = torch.arange(4.0)
o = 0
log = logging.getLogger("test_watch")
pattern = re.compile("a+")
numbers = itertools.count()
stream = iter([1.0, 2.0, 3.0])
own_numpy = numpy.random.default_rng(0)
own_python = random.Random(0)
own_torch = torch.Generator().manual_seed(0)
teacher = nn.Linear(4, 4).requires_grad_(False)
queue: collections.deque[float] = collections.deque(maxlen=3)
array = numpy.zeros(3)
root = Path("/data")
context = contextvars.ContextVar("context", default=0)
namespace = SimpleNamespace(seen=[])


class Meter:
    total = 0.0

    def __init__(self) -> None:
        self.count = 0

    def update(self) -> None:
        self.count += 1

    def update_by_function(self) -> None:
        count_step()


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def update(self) -> None:
        self.count += 1


class Losses(list[float]):
    pass


meter = Meter()


def count_step() -> None:
    global steps  # noqa: PLW0603
    steps += 1


def remember(value: float, kept: list[float] = []) -> None:  # noqa: B006
    kept.append(value)


class WritesOwnClass(Net):
    calls = 0

    def after(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x


class Acts(Net):
    """Calls a function of the test."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def after(self, x: Tensor) -> Tensor:
        self.act()
        return x


def write_class() -> None:
    Meter.total += 1.0


def write_array() -> None:
    array[1] += 1


def write_module() -> None:
    import state_of_script  # type: ignore[import-not-found]

    state_of_script.step += 1


def objects_in_attributes() -> Iterator[tuple[str, Any, Callable[[Any, Tensor], Any]]]:
    yield "generator", numpy.random.RandomState(0), lambda value, x: x * value.rand()
    yield "iterator", iter([1, 2, 3]), lambda value, x: x * next(value)
    yield "generator function", (number for number in range(9)), lambda value, x: x * next(value)
    yield "deque", collections.deque([1]), lambda value, x: value.append(2)
    yield "array", array_module.array("i"), lambda value, x: value.append(1)
    yield "object", Meter(), lambda value, x: value.update()
    yield "count", itertools.count(), lambda value, x: next(value)
    yield "slots", Slotted(), lambda value, x: value.update()
    yield "list of a class", Losses([1.0]), lambda value, x: value.append(2.0)
    yield "queue", queues.Queue(), lambda value, x: value.put(1)
    yield "local", threading.local(), lambda value, x: setattr(value, "number", 1)
    yield "counter", collections.Counter("a"), lambda value, x: value.update("b")
    yield "object in an object", SimpleNamespace(meter=Meter()), lambda value, x: value.meter.update()


class UsesAttribute(Net):
    def __init__(self, value: Any, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.value = value
        self.use = use

    def after(self, x: Tensor) -> Tensor:
        self.use(self.value, x)
        return x


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (count_step, "changes the global variable steps"),
        (lambda: history.append(0), "changes the global variable history"),
        (lambda: meter.update(), "changes the global variable meter"),  # noqa: PLW0108
        (lambda: meter.update_by_function(), "changes the global variable steps"),  # noqa: PLW0108
        (lambda: getattr(meter, "update")(), "changes the global variable meter"),  # noqa: B009, PLW0108
        (write_class, "changes the variable total of the class Meter"),
        (lambda: remember(1.0), "changes a default argument of remember"),
        (lambda: table.add_(1), "changes the global variable table"),
        (write_array, "changes the global variable array"),
        (lambda: teacher.weight.mul_(0.5), "changes the global variable teacher"),
        (lambda: own_numpy.random(), "changes the global variable own_numpy"),  # noqa: PLW0108
        (lambda: own_python.random(), "changes the global variable own_python"),  # noqa: PLW0108
        (lambda: torch.rand((), generator=own_torch), "changes the global variable own_torch"),
        (lambda: next(numbers), "uses the global variable numbers, which cannot be compared (count)"),
        (lambda: next(stream), "uses the global variable stream, which cannot be compared (list_iterator)"),
        (lambda: context.set(context.get() + 1), "changes the global variable context"),
        (lambda: [namespace.seen.append(number) for number in range(2)], "changes the global variable namespace"),
        (lambda: queue.append(1.0), "changes the global variable queue"),
    ],
)
def test_state_outside_is_a_reason(act: Callable[[], Any], words: str) -> None:
    with torch.no_grad():
        assert call(Acts(act), data()).reason == words


def test_variable_of_the_own_class_is_a_reason() -> None:
    assert call(WritesOwnClass(), data()).reason == "changes the variable calls of the class WritesOwnClass"


@pytest.mark.parametrize(("name", "value", "use"), list(objects_in_attributes()))
def test_object_in_attribute_is_a_reason(name: str, value: Any, use: Callable[[Any, Tensor], Any]) -> None:
    reason = call(UsesAttribute(value, use), data()).reason
    assert reason is not None
    assert "the attribute value of UsesAttribute" in reason, name


def test_state_of_a_module_of_the_script_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = ModuleType("state_of_script")
    state.__file__ = str(tmp_path / "state_of_script.py")
    state.step = 0
    monkeypatch.setitem(sys.modules, "state_of_script", state)
    assert call(Acts(write_module), data()).reason == "changes the variable step of the module state_of_script"


def test_object_as_hook_is_a_reason() -> None:
    class Collector:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.seen.append(output.dim())

    net = Net()
    net.layer.register_forward_hook(Collector())
    assert call(net, data()).reason == "changes a hook of Linear"


def test_closure_of_a_hook_is_a_reason() -> None:
    features: dict[str, Tensor] = {}
    net = Net()
    net.layer.register_forward_hook(lambda module, inputs, output: features.update(layer=output))
    assert call(net, data()).reason == "changes the variable features of the closure <lambda>"


def test_hook_of_the_module_itself_runs_outside() -> None:
    features: dict[str, Tensor] = {}
    net = Net()
    net.register_forward_hook(lambda module, inputs, output: features.update(out=output))
    assert watch(net, lambda: net.forward(data()), (data(),), {}).reason is None


def test_replaced_forward_is_followed() -> None:
    net = Net()
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return net.layer(x)  # type: ignore[no-any-return]

    net.forward = forward  # type: ignore[method-assign]
    assert call(net, data()).reason == "changes the variable calls of the closure forward"


def test_decorated_and_partial_functions_are_followed() -> None:
    class Decorated(Net):
        @torch.no_grad()
        def after(self, x: Tensor) -> Tensor:
            functools.partial(count_step)()
            return x

    assert call(Decorated(), data()).reason == "changes the global variable steps"


# ----- no reason -----------------------------------------------------------------------------------------------------


@dataclass
class Config:
    scale: float = 2.0
    kind: str = "relu"

    @functools.cached_property
    def double(self) -> float:
        return 2 * self.scale


config = Config()


def scaled(x: Tensor) -> Tensor:
    return x * settings["scale"] * config.scale


@functools.lru_cache
def half(size: int) -> int:
    return size // 2


class NamesAttributeLikeGlobal(Net):
    def __init__(self) -> None:
        super().__init__()
        self.o = 1

    def after(self, x: Tensor) -> Tensor:
        global_like_names()
        return x * self.o


def global_like_names() -> None:
    """A function that changes nothing."""


class Harmless(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = config
        self.device = torch.device("cpu")
        self.root = root
        self.calls = 0
        self.losses: list[float] = []
        self.cache: dict[int, Tensor] = {}
        self.activation = nn.GELU()
        self.function = F.relu
        self.unused_stream = iter([1, 2])
        self.mask: Tensor | None
        self.register_buffer("mask", None)

    def after(self, x: Tensor) -> Tensor:
        log.debug("rows %d", x.shape[0])
        assert pattern.match("aa")
        assert self.root.name == "data"
        self.calls += 1
        self.losses.append(0.0)
        if x.shape[1] not in self.cache:
            self.cache[x.shape[1]] = torch.ones(x.shape[1])
        if self.mask is None:
            self.mask = torch.ones(4)
        with torch.autocast("cpu", enabled=False):
            y: Tensor = scaled(self.function(self.activation(x))) * self.cache[x.shape[1]] * self.mask
        y = y * self.config.double + table.to("cpu") * half(4)
        y += teacher(x) * numpy.random.rand() * random.random()
        return y

    def never_called(self) -> float:
        return next(stream)


@pytest.mark.parametrize("kind", [Net, NamesAttributeLikeGlobal, Harmless])
@pytest.mark.parametrize("grad", [True, False])
def test_ordinary_code_is_no_reason(kind: type[nn.Module], grad: bool) -> None:
    net = kind()
    with torch.set_grad_enabled(grad):
        watched = call(net, data())
        assert watched.reason is None
        assert call(net, data()).reason is None
    assert watched.result.shape == (ROWS, 4)
    assert not watched.uses_checkpointing


@pytest.mark.parametrize("inference", [True, False])
def test_layers_of_torch_are_no_reason(inference: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(2))
    images = torch.randn(ROWS, 3, 8, 8)
    first = call(net, images)
    assert first.reason == "creates parameters, buffers or submodules"
    assert first.is_first_again
    with torch.inference_mode(inference):
        assert call(net, images).reason is None


def test_recurrent_and_attention_layers_are_no_reason() -> None:
    words = torch.randn(ROWS, 5, 8)
    assert call(nn.LSTM(8, 8, batch_first=True), words).reason is None
    assert call(nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True), words).reason is None


def test_result_and_generators_are_those_of_the_plain_call() -> None:
    net = Harmless()
    torch.manual_seed(0)
    expected = net(data())
    state = torch.get_rng_state()
    result = call(net, data()).result
    assert torch.equal(torch.get_rng_state(), state)
    assert result.shape == expected.shape


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_torchscript_is_a_reason() -> None:
    assert "torch.jit" in (call(torch.jit.script(nn.Linear(4, 4)), data()).reason or "")


def test_exception_of_the_call_propagates() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        call(Net(), torch.ones(2, 3))


# ----- arguments and outputs -----------------------------------------------------------------------------------------


class Applies(nn.Module):
    """A linear layer and a function of the test, which receives the input, the layer's output and other arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Any:
        return self.function(x, self.layer(x), *others, **options)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_writing_into_an_argument_is_a_reason(mode: Any) -> None:
    with mode():
        assert call(Applies(lambda x, y: y + x.relu_()), data()).reason == "writes into an argument"
    assert call(Applies(lambda x, y: y + x.requires_grad_()), data()).reason == "writes into an argument"


@pytest.mark.parametrize(
    "write",
    [
        lambda box: box["inner"].append(1),
        lambda box: box.update(other=2),
        lambda box: box.update(number=2),
        lambda box: box.pop("number"),
    ],
)
def test_changing_a_container_is_a_reason(write: Callable[[Any], None]) -> None:
    def use(x: Tensor, y: Tensor, box: Any) -> Tensor:
        write(box)
        return y

    reason = call(Applies(use), data(), {"inner": [0], "number": 1}).reason
    assert reason == "changes a container among its arguments"


Pair = collections.namedtuple("Pair", ["first", "second"])


def test_known_arguments_are_no_reason() -> None:
    options = {"mask": None, "kind": "a", "scale": 2.0, "dtype": torch.float32, "device": torch.device("cpu")}
    module = Applies(lambda x, y, *others, **options: {"y": y, "pair": Pair(y, 1), "none": None, "name": "a"})
    assert call(module, data(), [data(), (1, 2)], Pair(data(), 1), F.relu, **options).reason is None


class Opaque:
    pass


def test_unknown_objects_are_a_reason() -> None:
    given = call(Applies(lambda x, y, other: y), data(), Opaque()).reason
    returned = call(Applies(lambda x, y: [y, iter([y])]), data()).reason
    assert given == "is given an object of type Opaque"
    assert returned == "returns an object of type list_iterator"


# ----- tensors that leave or enter by other ways ---------------------------------------------------------------------


class Keeps(Net):
    def __init__(self, graph: bool) -> None:
        super().__init__()
        self.graph = graph
        self.kept: Any = None

    def after(self, x: Tensor) -> Tensor:
        self.kept = {"hidden": [x if self.graph else x.detach()]}
        return x.relu() * 2


def test_tensor_with_a_graph_in_an_attribute_is_a_reason() -> None:
    assert call(Keeps(True), data()).reason == "keeps a tensor with a graph in Keeps (kept)"
    assert call(Keeps(False), data()).reason is None


def test_tensor_kept_outside_is_a_reason() -> None:
    def keep(x: Tensor, y: Tensor) -> Tensor:
        setattr(Opaque, "kept", y.detach())  # noqa: B010
        return y * 2

    try:
        reason = call(Applies(keep), data()).reason
    finally:
        del Opaque.kept  # type: ignore[attr-defined]
    assert reason in (
        "keeps a tensor of the call outside of the module",
        "changes the variable kept of the class Opaque",
    )


def test_tensor_kept_in_an_unknown_place_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "changed", lambda before, after: None)
    kept: list[Tensor] = []

    def keep(x: Tensor, y: Tensor) -> Tensor:
        kept.append(y.exp())
        return y

    assert call(Applies(keep), data()).reason == "keeps a tensor of the call outside of the module"


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.x = x
        context.many = [x, x * 2]
        context.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_tensors_kept_by_the_graph_are_no_reason() -> None:
    doubles: Any = Doubles
    assert call(Applies(lambda x, y: doubles.apply(y.exp()).sum(1)), data()).reason is None


def test_captured_tensors_are_a_reason() -> None:
    hidden = nn.Parameter(torch.ones(4))
    weight = nn.Parameter(torch.ones(4))
    condition = weight * 2
    assert call(Applies(lambda x, y: y * hidden), data()).reason == "uses a parameter that is not its own"
    reason = call(Applies(lambda x, y: y * condition), data()).reason
    assert reason == "uses a tensor with a graph that is not an argument"
    assert call(Applies(lambda x, y, z: y * z), data(), condition).reason is None
    assert call(Applies(lambda x, y: y * torch.ones(4, requires_grad=True)), data()).reason is None


def test_hooks_are_a_reason() -> None:
    def hooked(x: Tensor, y: Tensor) -> Tensor:
        y.register_hook(lambda gradient: gradient)
        return y * 2

    assert call(Applies(hooked), data()).reason == "sets a hook of a tensor"
    assert call(Applies(lambda x, y: [y.retain_grad(), y * 2][1]), data()).reason == "sets a hook of a tensor"
    net = Net()
    net.layer.register_full_backward_hook(lambda *arguments: None)
    assert call(net, data()).reason == "has a backward hook on Linear"
    net = Net()
    net.layer.weight.register_hook(lambda gradient: gradient)
    assert call(net, data()).reason is None


def test_backward_and_sparse_gradients_are_a_reason() -> None:
    assert call(Applies(lambda x, y: [y.sum().backward(), y.detach()][1]), data()).reason == "calls backward"

    def sets_gradient(x: Tensor, y: Tensor) -> Tensor:
        parameter.grad = torch.zeros(4)
        return y

    module = Applies(sets_gradient)
    module.weight = parameter = nn.Parameter(torch.ones(4))
    assert call(module, data()).reason == "writes gradients of parameters"
    words = torch.zeros(ROWS, 2, dtype=torch.long)
    assert call(nn.Embedding(3, 4, sparse=True), words).reason == "has sparse gradients"
    assert call(nn.Embedding(3, 4), words).reason is None


# ----- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x, y: y * y.max().item(), "item"),
        (lambda x, y: y * float(y.data.mean()), "float"),
        (lambda x, y: y * len(x.tolist()), "tolist"),
        (lambda x, y: y if (x > 0).sum() > 3 else -y, "bool"),
        (lambda x, y: y if (x.mean(0) > 0).any() else -y, "bool"),
        (lambda x, y: y * x.T[0].sum().item(), "item"),
        (lambda x, y: y * torch.stack([x, x])[0].sum().item(), "item"),
        (lambda x, y: y if torch.equal(x, y) else -y, "equal"),
        (lambda x, y: [f"{y.mean():.2f}", y][1], "format"),
    ],
)
def test_numbers_of_rows_are_a_reason(read: Callable[..., Any], name: str) -> None:
    assert call(Applies(read), data()).reason == f"turns values of rows into Python numbers ({name})"


def test_numbers_written_in_place_are_a_reason() -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(3, 4)
        total[0] = y.detach().sum(0)
        return y * total.sum().item()

    def write_into_view(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(3, 4)
        total[0].copy_(y.detach().sum(0))
        return y * total.sum().item()

    for function in (write, write_into_view):
        assert call(Applies(function), data()).reason == "turns values of rows into Python numbers (item)"


class ReadsStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        mean: Any = self.norm.running_mean
        y: Tensor = self.norm(x)
        return y * float(mean.sum())


def test_numbers_of_running_statistics_are_no_reason() -> None:
    # Divided calls compute the statistics of the whole batch.
    assert call(ReadsStatistics(), data()).reason is None
    assert call(ReadsStatistics().eval(), data()).reason is None


def test_numbers_without_rows_are_no_reason() -> None:
    module = Applies(lambda x, y, time: y * time.item() * float(torch.linspace(0, 1, 5)[1]) * x.shape[0] * x.numel())
    assert call(module, data(), torch.tensor(3.0)).reason is None


def test_any_and_all_over_rows_are_no_reason() -> None:
    def tests(x: Tensor, y: Tensor) -> Tensor:
        if torch.isnan(y).any() or not torch.all(x > -100):
            return y * 0
        return y

    watched = call(Applies(tests), data())
    assert watched.reason is None
    distribution = Applies(lambda x, y: torch.distributions.Normal(y, 1.0).mean)
    assert call(distribution, data()).reason is None


def test_all_by_sums_is_no_reason() -> None:
    def tests(x: Tensor, y: Tensor) -> Tensor:
        mask = x > -100
        return y if mask.sum() == mask.numel() else -y

    watched = call(Applies(tests), data())
    assert watched.reason is None
    other = call(Applies(lambda x, y: y if (x > -100).sum() == 3 else -y), data())
    assert other.reason == "turns values of rows into Python numbers (bool)"


def test_arguments_by_name_are_no_reason() -> None:
    module = Applies(lambda x, y: y * torch.mean(input=y) * torch.eq(y.detach().sum(), other=0.0))
    assert call(module, data()).reason is None


# ----- random draws, checkpoints, structure --------------------------------------------------------------------------


def test_draws_without_a_rule_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(operations.RULES, F.dropout, raising=False)
    module = Applies(lambda x, y: F.dropout(y, 0.5))
    assert call(module, data()).reason == "draws random numbers inside of dropout"
    monkeypatch.setitem(
        operations.RULES, F.dropout, lambda _, function, arguments, options: function(*arguments, **options)
    )
    assert call(module, data()).reason is None
    monkeypatch.delitem(operations.RULES, torch.lstm, raising=False)
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)
    assert call(lstm, torch.randn(ROWS, 3, 4)).reason == "draws random numbers inside of lstm"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_seen(reentrant: bool) -> None:
    layer = nn.Linear(4, 4)
    module = Applies(lambda x, y: checkpoint(lambda z: z.relu().exp(), y.exp(), use_reentrant=reentrant))
    watched = call(module, data())
    assert watched.reason is None
    assert watched.uses_checkpointing
    assert not call(layer, data()).uses_checkpointing


class Grows(Net):
    def after(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(4))
        return x * self.scale


def test_created_parameters_make_the_next_call_a_first_call() -> None:
    net = Grows()
    first = call(net, data())
    assert first.is_first_again
    assert first.reason == "creates parameters, buffers or submodules"
    second = call(net, data())
    assert not second.is_first_again
    assert second.reason is None
