"""`Rows` on real ranks: every operation of a table, consumers, messages of one rank alone, and divided calls."""

from __future__ import annotations

import copy
import faulthandler
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import samestep
from helpers.forked_ranks import RankServer, refusal
from samestep.errors import SamestepError
from samestep.microbatches import Slices, rank_bounds
from samestep.parallelize import joined_view
from samestep.view.crossings import RowBounds
from samestep.view.rows_tensor import Rows, gathered
from samestep.view.view import View
from unit.view.rows_table import CASES, FORMS, Case, Leaves

ROWS = 7


def rows(seed: int = 0, *shape: int) -> tuple[torch.Tensor, Rows]:
    """Return a tensor, and the same as Rows."""
    whole = torch.randn(ROWS, *(shape or (3, 4, 5)), generator=torch.Generator().manual_seed(seed))
    view = joined_view(None, "fast")
    ranks = view.ranks
    bounds = RowBounds(view.row_messages(), Slices(rank_bounds(ROWS, ROWS, ranks.size), ranks.size, ranks.rank))
    return whole, Rows(whole[bounds.start : bounds.stop].clone(), bounds)


def consumers() -> list[str]:
    """Return the names of consumers for which Rows are something else than the tensor."""
    samestep.init(threads=1)
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt
    import torchmetrics
    import torchvision.transforms.v2
    from PIL import Image

    whole, own = rows()
    labels = torch.arange(ROWS) % 3
    classes, own_classes = rows(1, 3)

    def curve(values: torch.Tensor) -> Any:
        (line,) = plt.plot(values.flatten(1)[:, 0])
        return line.get_ydata().tolist()

    calls = {
        "PIL": lambda x: numpy.asarray(Image.fromarray(x[0].sigmoid().mul(255).byte().permute(1, 2, 0).numpy())).sum(),
        "to_pil_image": lambda x: torchvision.transforms.functional.to_pil_image(x[1].sigmoid()).size,
        "make_grid": lambda x: torchvision.utils.make_grid(x).sum().item(),
        "normalize": lambda x: torchvision.transforms.Normalize([0.5] * 3, [0.5] * 3)(x).sum(),
        "flip": lambda x: torchvision.transforms.v2.RandomHorizontalFlip(1.0)(x)[0].tolist(),
        "matplotlib": curve,
        "histogram": lambda x: plt.hist(x.flatten().numpy())[0].tolist(),
        "numpy": lambda x: numpy.mean(x.numpy()),
        "asarray": lambda x: numpy.asarray(x)[2, 1].tolist(),
        "stack": lambda x: numpy.stack([x, x]).shape,
    }
    scores = {
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3),
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=3),
        "confusion": torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3),
    }
    for name, metric in scores.items():
        calls[name] = _scored(metric, whole, classes, own_classes, labels)
    return [name for name, call in calls.items() if not numpy.allclose(call(whole), call(own), atol=1e-6)]


def _scored(metric: Any, whole: torch.Tensor, *tensors: torch.Tensor) -> Any:
    classes, own_classes, labels = tensors
    return lambda x: torch.as_tensor(metric(classes if x is whole else own_classes, labels)).tolist()


def alone() -> list[list[str]]:
    """Return for operations that one rank alone reaches the code of its error, and that of the others."""
    world = samestep.init(threads=1)
    _, own = rows()
    if world.rank == 0:
        found = refusal(own.__getitem__, 3)
    else:
        found = refusal(own.std)
    return samestep.all_gather(found[:1], world)


def in_thread() -> list[str]:
    """Return the error of a gather in another thread, and the text of Rows in a traceback."""
    samestep.init(threads=1)
    _, own = rows()
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(refusal(own.__getitem__, 3)))
    thread.start()
    thread.join()
    namespace: dict[str, Any] = {"__name__": "traceback", "x": own}
    exec("def show(): return repr(x)", namespace)
    found.append(namespace["show"]())
    own.numpy()
    thread = threading.Thread(target=lambda: found.extend(refusal(own.__getitem__, 3)))
    thread.start()
    thread.join()
    return found


def divided() -> dict[str, Any]:
    """Train a model whose outputs stay divided; return losses, and what is divided."""
    samestep.init(threads=1)
    View.divides_small_calls = True
    View.output_limit = 1
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    second = nn.Conv2d(3, 2, 1).double()
    models = [plain, second]
    copies = [copy.deepcopy(model) for model in models]
    x = torch.randn(ROWS, 3, 8, 8, dtype=torch.float64)
    y = torch.randint(0, 2, (ROWS, 8, 8))
    expected = _train(copies, x, y)
    for model in models:
        samestep.parallel(model)
    found = _train(models, x, y)
    with torch.no_grad():
        output = [models[0](x) for _ in range(3)][-1]  # a call is watched first
    return {"expected": expected, "found": found, "is divided": isinstance(output, Rows), "shape": list(output.shape)}


def _train(models: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], 0.1)
    losses = []
    for _ in range(5):
        hidden = models[0](x).tanh()
        output = models[1](hidden)
        loss = hidden.square().mean()
        loss += nn.functional.cross_entropy(output, y) + (output * hidden[:, :2]).sum() * 1e-3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *[parameter.sum().item() for model in models for parameter in model.parameters()]]


_SEED = 3


def run(form: str = "", cases: list[str] | None = None, progress: str = "") -> dict[str, Any]:
    """Return the number of cases of a form of tensors, and the difference of each case that has one, by name."""
    torch.set_num_threads(1)
    if progress:
        faulthandler.dump_traceback_later(100, exit=True)
    samestep.init(threads=1)
    view = joined_view(None, "fast")
    found: dict[str, Any] = {}
    count = 0
    for case in CASES:
        if case.name not in cases if cases else case.form != form:
            continue
        count += 1
        if progress:
            Path(f"{progress}{view.ranks.rank}").write_text(case.name, encoding="utf-8")
        for difference in _differences(case, view):
            found.setdefault(case.name, difference)
    return {"cases": count, **found}


def _differences(case: Case, view: Any) -> Iterator[str]:
    for has_gradients in (True, False):
        if has_gradients and not case.has_gradients:
            continue
        plain = _outcome(case, None, has_gradients)
        own = _outcome(case, view, has_gradients)
        if not own:
            continue
        if "error" in own and "error" not in plain:
            yield own["error"]
            continue
        for name in [*plain, *own]:
            difference = _difference(plain.get(name), own.get(name), case.tolerance)
            if difference:
                yield f"{name}{' with gradients' if has_gradients else ''}: {difference}"


def _difference(one: Any, other: Any, tolerance: float) -> str:
    if isinstance(one, float) and isinstance(other, float):
        one, other = torch.tensor(one), torch.tensor(other)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "" if type(one) is type(other) and one == other else f"{one!r:.300} / {other!r:.900}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{tuple(one.shape)} {one.dtype} / {tuple(other.shape)} {other.dtype}"
    if one.is_floating_point():
        if torch.allclose(one.double(), other.double(), tolerance, tolerance, equal_nan=True):
            return ""
        return f"differ by {(one.double() - other.double()).abs().max():.1e}"
    return "" if torch.equal(one, other) else f"{one} / {other}"


def _outcome(case: Case, view: Any, has_gradients: bool) -> dict[str, Any]:
    """Return everything that a case computes, on plain tensors without a view."""
    torch.manual_seed(_SEED)
    leaves = Leaves(has_gradients)
    inputs = [leaves.own(value) for value in case.inputs()]
    if view is not None:
        bounds = [
            (case.batch * rank // view.ranks.size, case.batch * (rank + 1) // view.ranks.size)
            for rank in range(view.ranks.size)
        ]
        slices = Slices(bounds, view.ranks.size, view.ranks.rank)
        rows = [RowBounds(view.row_messages(), slices, len(value) // case.batch) for value in inputs]
        inputs = [
            value.detach()[bound.start : bound.stop].clone().requires_grad_(value.requires_grad)
            for value, bound in zip(inputs, rows, strict=True)
        ]
    # Rows that require gradients are results, since a leaf is gathered.
    arguments = [value.clone() if has_gradients else value for value in inputs]
    if view is not None:
        arguments = [Rows(value, bound) for value, bound in zip(arguments, rows, strict=True)]
    found: dict[str, Any] = {}
    try:
        result = case.compute(leaves, *arguments)
        results = [item for item in _tensors(result) if isinstance(item, Tensor)]
        for index, item in enumerate(_tensors(result)):
            found[f"value {index}"] = gathered(item).detach().clone() if isinstance(item, Tensor) else item
        if has_gradients:
            _backward(results)
    except SamestepError as error:
        if case.name.startswith("may be refused") and error.code == "E_INCOMPATIBLE":
            return {}
        found["error"] = "refused" if case.is_refused else traceback.format_exc()[-900:]
        return found
    except Exception as error:
        found["error"] = "refused" if case.is_refused else f"{type(error).__name__} {error}"[:100]
        return found
    if case.is_refused:
        return {"error": "refused" if view is None else "was not"}
    if has_gradients:
        for index, value in enumerate(inputs):
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            found[f"gradient {index}"] = gradient if view is None else rows[index].gather([gradient + 0])
        for name, value in leaves.made.items():
            found[f"gradient of {name}"] = value.grad
    else:
        _write(results, arguments, found)
    found["generator"] = torch.rand(1)
    return found


def _tensors(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [one for item in result for one in _tensors(item)]
    return [result]


def _backward(results: list[Tensor]) -> None:
    total = None
    for item in results:
        if item.requires_grad:
            weights = torch.linspace(1, 2, item.numel(), dtype=torch.float64).view(item.shape)
            part = (item.double() * weights).sum()
            total = part if total is None else total + part
    if total is not None and total.requires_grad:
        total.backward()


def _write(results: list[Tensor], arguments: list[Tensor], found: dict[str, Any]) -> None:
    """Write into the results and the arguments in several ways, and note what each sees."""
    writes: list[Callable[[Tensor], Any]] = [
        lambda value: value.fill_(1),
        lambda value: value[0].fill_(2),
        lambda value: value.numpy().__setitem__(Ellipsis, 3),
        lambda value: value[-1:].fill_(4),
    ]
    targets = [*results[:2], *arguments]
    for number, write in enumerate(writes):
        for place, value in enumerate(targets):
            if value.dim() == 0 or (value.dtype == torch.bfloat16 and number == 2):
                continue
            try:
                write(value)
            except (RuntimeError, ValueError, IndexError) as error:
                found[f"write {number} {place}"] = str(error)[:60]
        for index, item in enumerate(targets):
            found[f"write {number}, seen by {index}"] = gathered(item.clone()).clone()


QUICK_FORMS = ("float16", "int64")


def differences(on_ranks: RankServer, ranks: int, *forms: str) -> dict[str, Any]:
    """Return the cases that differ between plain tensors and Rows."""
    found: dict[str, Any] = {}
    for form in forms:
        result = on_ranks(run, ranks, timeout=900, form=form)
        assert result.pop("cases") == sum(case.form == form for case in CASES)
        found |= result
    return found


def test_table_has_enough_operations() -> None:
    assert sum(case.form == "" for case in CASES) >= 300


@pytest.mark.parametrize(
    ("ranks", "forms"),
    [
        (2, QUICK_FORMS),
        pytest.param(2, ("",), marks=pytest.mark.long),
        pytest.param(3, ("",), marks=pytest.mark.slow),
        *(
            pytest.param(3 if form == "single rows" else 2, (form,), marks=pytest.mark.long)
            for form in FORMS
            if form not in QUICK_FORMS
        ),
    ],
)
def test_operations_equal_those_of_plain_tensors(ranks: int, forms: tuple[str, ...], on_ranks: RankServer) -> None:
    assert differences(on_ranks, ranks, *forms) == {}


def test_one_rank_alone_is_refused(on_ranks: RankServer) -> None:
    assert on_ranks(alone, 2) == [["E_RANK_DESYNC"], ["E_RANK_DESYNC"]]


def test_another_thread_is_refused(on_ranks: RankServer) -> None:
    code, _, shown, *later = on_ranks(in_thread, 2)
    assert code == "E_RUN"
    assert shown == "tensor(shape=[7, 3, 4, 5], dtype=torch.float32, rows 0 to 2 are here)"
    assert later == ["none", ""]


def test_outputs_stay_divided(on_ranks: RankServer) -> None:
    result = on_ranks(divided, 2)
    assert result["is divided"]
    assert result["shape"] == [7, 3, 8, 8]
    assert result["found"] == pytest.approx(result["expected"], rel=1e-10)


@pytest.mark.slow
def test_consumers_see_the_whole_tensor(on_ranks: RankServer) -> None:
    for name in ("torchmetrics", "torchvision", "matplotlib", "PIL"):
        pytest.importorskip(name)
    assert on_ranks(consumers, 2) == []
