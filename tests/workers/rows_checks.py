"""Rows outside of tables of operations: consumers of tensors, messages of one rank alone, divided calls."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy
import torch
from torch import nn

import samestep
from helpers.forked_ranks import refusal
from samestep.global_view import joined_view
from samestep.view.crossings import RowBounds
from samestep.view.ranks import Slices, rank_bounds
from samestep.view.rows import Rows, is_rows
from samestep.view.view import View

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
    return {"expected": expected, "found": found, "is divided": is_rows(output), "shape": list(output.shape)}


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
