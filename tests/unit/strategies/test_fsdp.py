"""Calls with parameters that are divided between real ranks, compared with the plain loop."""

from __future__ import annotations

import copy
import hashlib
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import get_ema_multi_avg_fn

import samestep
from helpers.compared_calls import COMPARED, SEVERAL, TOLERANCE, require_forms, require_gradients, results_of_ranks
from helpers.forked_ranks import RankServer
from helpers.view_checks import difference, error_code, run_checks
from samestep.config import MeshConfig, StrategyConfig
from samestep.errors import SamestepError
from samestep.parallelize import parallel_module
from samestep.strategies.divided_parameters import full_tensor, is_divided
from samestep.view.view import View

EPOCHS = 3
CHECKS: dict[str, Callable[[], Any]] = {}  # each returns a JSON value on each rank
OPTIONS: dict[str, Any] = {}  # of `samestep.parallel`
BITS: dict[str, Callable[[], Any]] = {}  # each returns the same on all numbers of ranks under `exact`


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def run(strategy: str, replicate: int = 1) -> dict[str, list[Any]]:
    """Return the results of all checks on each rank."""
    return run_checks(CHECKS, configuration(strategy, replicate))


def run_exact(strategy: str, replicate: int = 1, slices: int = 1) -> dict[str, list[Any]]:
    """Return the results of the checks of bits on each rank, with a number of slices of products."""
    if slices > 1:
        OPTIONS["tensor_slices"] = slices
    config = None if strategy == "ddp" else configuration(strategy, replicate)
    return run_checks(BITS, config, "exact")


def configuration(strategy: str, replicate: int = 1) -> StrategyConfig:
    return StrategyConfig(name=strategy, mesh=MeshConfig(replicate=replicate))  # type: ignore[arg-type]


def of_bits(function: Callable[[], Any]) -> Callable[[], Any]:
    BITS[function.__name__] = function
    return function


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed: int) -> Tensor:
    return torch.randn(11, 6, generator=torch.Generator().manual_seed(seed))


def divided(module: nn.Module) -> Any:
    """Return a module with divided calls; under `tp` one of its layers is divided."""
    options = dict(OPTIONS)
    if options or samestep.init().mesh_shape.tensor > 1:
        name = "0" if isinstance(module, nn.Sequential) else "last"
        options["tensor_plan"] = {name: "row"}
    return samestep.parallel(module, **options)


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        optimizer.zero_grad()
        model(batch(number)).pow(2).mean().backward()
        optimizer.step()
    return model


@check
def full_state() -> Any:
    """Full tensors under the plain names, which plain and divided modules load."""
    plain, model = trained(network()), trained(divided(network()))
    state = samestep.full_state_dict(model)
    fresh = network()
    fresh.load_state_dict(state)
    other = divided(network())
    other.load_state_dict(state)
    reloaded = samestep.full_state_dict(other)
    return [
        list(state) == list(plain.state_dict()),
        {type(value) for value in state.values()} == {Tensor},
        difference(list(plain.state_dict().values()), list(fresh.state_dict().values())) < 1e-12,
        all(torch.equal(state[name], reloaded[name]) for name in state),
    ]


@check
def parts() -> Any:
    """Each rank has a part of a parameter, and copies have memory of their own."""
    model: Any = divided(network())
    copied = copy.deepcopy(model)
    own = model[0].weight.to_local()
    with torch.no_grad():
        copied[0].weight.to_local().zero_()
    return [own.numel(), bool(own.any()), type(model) is type(copied), type(model).__name__]


@check
def gradient_norm() -> Any:
    norms = []
    for model in (network(), divided(network())):
        for number in range(3):
            model.zero_grad()
            model(batch(number)).pow(2).mean().backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        norms.append((norm, float(nn.utils.get_total_norm([one.grad for one in model.parameters()]))))
    return max(abs(one - other) for one, other in zip(*norms, strict=True)) < 1e-12


@check
def stale_optimizer() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    divided(model)(batch(0)).mean().backward()
    return error_code(optimizer.step)


@check
def divided_twice() -> Any:
    model: Any = network()
    divided(model[:2])
    return error_code(lambda: divided(model))


@check
def replaced_parameter() -> Any:
    model: Any = divided(network())
    for number in range(3):
        model(batch(number)).mean().backward()
    model[0].weight = nn.Parameter(torch.zeros(8, 6))
    return error_code(lambda: model(batch(0)))


@check
def gradients_differentiated_again() -> Any:
    model = divided(network())
    for number in range(3):
        loss = model(batch(number)).mean()
    return error_code(lambda: torch.autograd.grad(loss, list(model.parameters()), create_graph=True))


@check
def unused_backward() -> Any:
    """Forwards without a backward, and evaluations, leave nothing for later ones."""
    model = divided(network())
    plain = network()
    for number in range(4):
        for one in (model, plain):
            one(batch(number))
            with torch.no_grad():
                one(batch(number))
            (one(batch(number)).mean() + one(batch(number + 1)).pow(2).mean()).backward()
    gradients: list[Any] = [one.grad for one in model.parameters()]
    return difference([one.grad for one in plain.parameters()], gradients) < 1e-12


@check
def numbers_of_parameters() -> Any:
    """Numbers taken out of divided tensors, and random numbers of their shapes, are those of complete ones."""
    found = []
    for model in (network(), divided(network())):
        torch.manual_seed(3)
        weight: Any = model[0].weight  # type: ignore[index]
        noisy = (weight + torch.randn_like(weight)).detach()
        nn.init.uniform_(other := torch.zeros_like(weight.detach()))
        weight.data = weight.data.clamp(max=0.1)
        numbers = [weight.sum(), weight.norm(), weight.pow(2).mean(), noisy.abs().max(), other.sum(), (noisy > 0).all()]
        found.append([float(number.detach()) for number in numbers])
    return max(abs(one - other) for one, other in zip(*found, strict=True)) < 1e-12


@check
def optimizer_with_sums() -> Any:
    """Adafactor takes means over rows and columns of gradients; L-BFGS joins parameters in one vector."""

    def layers() -> nn.Module:
        # No batch norm: the bias before it has gradients of rounding errors, which Adafactor scales up.
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))

    found = []
    for model in (layers(), divided(layers())):
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        for number in range(5):
            optimizer.zero_grad()
            model(batch(number)).pow(2).mean().backward()
            optimizer.step()
        of_vector = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

        def closure(model: nn.Module = model, of_vector: Any = of_vector) -> Tensor:
            of_vector.zero_grad()
            loss = model(batch(5)).pow(2).mean()
            loss.backward()
            return loss

        of_vector.step(closure)
        found.append([full_tensor(one).detach() for one in model.parameters()])
    return difference(*found) < 1e-12


@check
def sums_written_in_place() -> Any:
    """Operations that write into a sum or a norm over divided rows write into the whole of it."""
    found = []
    for model in (network(), divided(network())):
        weight: Any = model[0].weight.detach()  # type: ignore[index]
        values = [weight.sum(0).square_(), weight.norm(dim=0).add_(1.0), weight.mean(0).clamp_(min=0.1)]
        values += [weight.sum(0).fill_(2.0), weight.amax(0).lerp_(weight.sum(0), 0.3), weight.sum().sub_(1.0)]
        found.append([full_tensor(one) for one in values])
    return difference(*found) < 1e-12


def set_item(index: Any, value: Any) -> Callable[[Tensor], Any]:
    return lambda weight: weight.__setitem__(index, value)


# Writes into a weight of 8 rows and 6 columns, through views, indices and operations in place.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": set_item(0, 0.0),
    "element": set_item((-1, -1), 9.0),
    "rows": set_item(slice(1, 3), 0.0),
    "column": set_item((slice(None), 2), 0.0),
    "mask": set_item(torch.arange(8) % 2 == 0, 0.0),
    "list": set_item([0, 5], 0.0),
    "row in place": lambda w: w[2].zero_(),
    "rows in place, twice": lambda w: [w[2:4].mul_(2), w[3:5].add_(1)],
    "one view, twice": lambda w: [row.add_(1).mul_(2) for row in (w[5],)],
    "view of views": lambda w: w.view(4, 2, 6)[1, :, 3].mul_(3),
    "row of transpose": lambda w: w.t()[2].zero_(),
    "each row": lambda w: [row.mul_(number) for number, row in enumerate(w)],
    "row from row": lambda w: w[0].copy_(w[7]),
    "swapped rows": lambda w: w.__setitem__(slice(0, 2), w[[1, 0]]),
    "chunk": lambda w: w.chunk(4)[1].zero_(),
    "split": lambda w: w.split(3)[2].zero_(),
    "diagonal": lambda w: w[:6].diagonal()[2:].add_(1),
    "data": lambda w: w.data[3].zero_(),
    "drawn rows": lambda w: nn.init.normal_(w[2:5]),
    "several rows": lambda w: torch._foreach_mul_([w[0], w[3], w[7]], 2.0),
    "index_add": lambda w: w.index_add_(0, torch.tensor([1, 6]), torch.ones(2, 6)),
    "scatter": lambda w: w.scatter_(0, torch.tensor([[0, 1, 2, 3, 4, 5]]), 9.0),
    "masked_scatter": lambda w: w.masked_scatter_(torch.eye(8, 6).bool(), torch.arange(6.0)),
    "cumsum": lambda w: w.cumsum_(0),
    "tril": lambda w: w.tril_(1),
    "renorm": lambda w: w.renorm_(2, 0, 1.0),
    "means of columns": lambda w: w.sub_(w.mean(0)),
    "out": lambda w: torch.mul(torch.full((8, 6), 3.0), w, out=w),
}


@check
def writes() -> Any:
    """Return the writes with another effect than on a complete tensor."""
    differing = []
    for name, write in WRITES.items():
        values = []
        for model in (network(), divided(network())):
            weight: Any = model[0].weight.detach()  # type: ignore[index]
            torch.manual_seed(1)
            write(weight)
            values.append(full_tensor(weight))
        if difference(values[:1], values[1:]) > 1e-12:
            differing.append(name)
    return differing


@check
def state_from_before() -> Any:
    """Gradient, hooks and attributes of a parameter stay when it is divided."""
    found = []
    for divides in (False, True):
        model: Any = network()
        model(batch(0)).pow(2).mean().backward()
        weight = model[0].weight
        seen: list[int] = []
        weight.register_hook(lambda gradient: gradient * 0.5)
        handle = weight.register_post_accumulate_grad_hook(lambda _, seen=seen: seen.append(1))
        weight.decay = 0.3
        if divides:
            model = divided(model)
        for number in range(3):
            model(batch(number)).pow(2).mean().backward()
        handle.remove()
        model(batch(3)).pow(2).mean().backward()
        numbers = torch.tensor([float(len(seen)), model[0].weight.decay])
        found.append([full_tensor(one.grad) for one in model.parameters()] + [numbers])
    return difference(*found) < 1e-12


@check
def assigned_data() -> Any:
    """Weights that a script keeps, replaces by an average for an evaluation, and puts back."""
    found = []
    for model in (network(), divided(network())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        shadow = [one.data.clone() for one in model.parameters()]
        values = []
        for number in range(4):
            optimizer.zero_grad()
            model(batch(number)).pow(2).mean().backward()
            optimizer.step()
            for one, average in zip(model.parameters(), shadow, strict=True):
                average.mul_(0.9).add_(one.data, alpha=0.1)
            kept = [one.data for one in model.parameters()]
            for one, average in zip(model.parameters(), shadow, strict=True):
                one.data = average
            with torch.no_grad():
                values.append(model(batch(9)))
            for one, value in zip(model.parameters(), kept, strict=True):
                one.data = value
        model[0].weight.data = torch.ones(8, 6)  # type: ignore[index]
        found.append([*values, model(batch(8)), *[full_tensor(one).detach() for one in model.parameters()]])
    return difference(*found) < 1e-12


@check
def other_shapes() -> Any:
    """A tensor that is divided cannot change its shape in place."""
    weight: Any = divided(network())[0].weight.detach()
    changes = (weight.t_, lambda: weight.unsqueeze_(0), lambda: weight[:, :1].squeeze_(1))
    return [error_code(change) for change in changes]


@check
def deferred_sums() -> Any:
    """Gradients of `no_sync` are in the first backward after it, whatever `zero_grad` does."""
    found = []
    for model in (network(), divided(network())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(6):
            optimizer.zero_grad(set_to_none=number < 3)
            with samestep.no_sync(model):
                model(batch(number)).pow(2).mean().backward()
                model(batch(number + 1)).pow(2).mean().backward()
            model(batch(number + 2)).mean().backward()
            optimizer.step()
        found.append([full_tensor(one).detach() for one in model.parameters()])
    return difference(*found) < 1e-12


@check
def overflow_in_one_part() -> Any:
    """A step with an infinite gradient in the part of one rank is left out on all of them."""
    found = []
    for model in (network(), divided(network())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(model(batch(number)).pow(2).mean()).backward()
            if number == 2:
                weight: Any = model[0].weight  # type: ignore[index]
                weight.grad[-1, -1] = math.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        found.append([full_tensor(one).detach() for one in model.parameters()] + [torch.tensor(scaler.get_scale())])
    return difference(*found) < 1e-12 and float(found[0][-1]) == 4.0


@check
def moving_average() -> Any:
    """An average of the weights, in a copy of the module with divided calls of its own."""
    outputs = []
    for model in (network(), divided(network())):
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(4):
            optimizer.zero_grad()
            model(batch(number)).pow(2).mean().backward()
            optimizer.step()
            average.update_parameters(model)
        average.eval()
        with torch.inference_mode():
            outputs.append(average(batch(9)).clone())
    return difference(outputs[:1], outputs[1:]) < 1e-12


@check
def penalty_with_attention() -> Any:
    """The gradient of a loss with a penalty reaches operations for which torch has no rule of DTensors."""

    def attention() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))

    found = []
    for model in (attention(), divided(attention())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            penalty = sum(one.norm() for one in model.parameters())
            (model(sequences(number)).pow(2).mean() + 0.01 * penalty).backward()
            optimizer.step()
        found.append([full_tensor(one).detach() for one in model.parameters()])
    return difference(*found) < 1e-12


class Scaled(nn.Module):
    """Layers, and a parameter that is not divided under `fsdp`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.last(self.first(x).tanh())


@check
def functional_parameters() -> Any:
    """One backward through calls with the parameters of the module and with others, which both stay what they are."""
    found = []
    for model in (Scaled(), divided(Scaled())):
        own = dict(model.named_parameters())
        others = {name: one.detach().clone().requires_grad_() for name, one in own.items() if name != "last.bias"}
        optimizer = torch.optim.SGD([*own.values(), *others.values()], lr=0.1, momentum=0.9)
        for number in range(3):
            optimizer.zero_grad()
            losses = []
            for weights in (others, own, others):
                losses.append(functional_call(model, weights, (batch(number + len(losses)),)).pow(2).mean())
            sum(losses).backward()  # type: ignore[attr-defined]
            optimizer.step()
        assert [id(one) for one in model.parameters()] == [id(one) for one in own.values()]
        found.append([full_tensor(one).detach() for one in (*own.values(), *others.values())])
    return difference(*found) < 1e-12


@check
def another_type() -> Any:
    """Calls of a model that has another dtype than in earlier calls; a graph of these has lost its values."""
    found = []
    for prepared in (lambda module: module, divided):
        # With a bias of one element, of which only one rank has a part.
        model = prepared(nn.Sequential(*network(), nn.Linear(3, 1)).float())
        graph = model(batch(0).float()).pow(2).mean()
        graph.backward(retain_graph=True)
        before = model(batch(1).float()).detach()
        model.double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            optimizer.zero_grad()
            model(batch(number)).pow(2).mean().backward()
            optimizer.step()
        codes = [error_code(graph.backward), owner.summary.whole if (owner := parallel_module(model)) else 0]
        found.append([before.double(), *[full_tensor(one).detach() for one in model.parameters()]])
    return [difference(*found) < 1e-6, *codes]


@check
def graphs_from_before_a_step() -> Any:
    """A backward after a step is an error if it needs the former values, and right if it does not."""
    found = []
    for prepared in (lambda module: module, divided):
        codes = []
        values: list[Tensor | None] = []
        for plain in (network(), nn.Sequential(nn.Linear(6, 3))):
            model = prepared(plain)
            for number in range(2):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=number > 0)
                optimizer.zero_grad()
                before = model(batch(number)).pow(2).mean()
                model(batch(number + 1)).pow(2).mean().backward()
                optimizer.step()
                after = model(batch(number)).pow(2).mean()
                codes.append(error_code(before.backward))
                if codes[-1] != "none":
                    optimizer.zero_grad()
                after.backward()
                optimizer.step()
            values += [full_tensor(one).detach() for one in model.parameters()]
        found.append((codes, values))
    (expected, plain_values), (codes, values) = found
    assert expected == ["RuntimeError"] * 2 + ["none"] * 2, expected
    return codes == expected and difference(plain_values, values) < 1e-12


@check
def saved_parameters() -> Any:
    """A file that all ranks write has complete tensors; one rank alone cannot write it."""
    model = divided(network())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    world = samestep.init()
    code = "none"
    if world.rank == 0:
        code = error_code(lambda: torch.save(model.state_dict(), io.BytesIO()))
    else:
        code = error_code(lambda: model(batch(0)))
    plain = network().state_dict()
    return [all(torch.equal(loaded[name], value) for name, value in plain.items()), code]


class Parts(nn.Module):
    """Recurrent, frozen, shared, normalizing and unused parts, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 5, batch_first=True)
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 3)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.recurrent(x)[0][:, -1]
        y = self.frozen(nn.functional.dropout(self.norm(self.first(y)), 0.2, self.training))
        return self.last(torch.tanh(y) * self.scale + self.first(x[:, 0, :5]))


def sequences(number: int) -> Tensor:
    return torch.randn(11, 4, 6, generator=torch.Generator().manual_seed(number))


def bits_of(model: nn.Module, losses: list[Any]) -> list[Any]:
    owner = parallel_module(model)
    assert owner is not None
    digest = hashlib.sha256()
    state = list(samestep.full_state_dict(model).values())
    gradients = [full_tensor(one.grad) for one in model.parameters() if one.grad is not None]
    for tensor in [*state, *gradients]:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    memory = 0
    if is_divided(next(model.parameters())):
        strategy: Any = owner.strategy
        gathered = getattr(strategy._hub, "_complete", {})
        memory = sum(one.full.untyped_storage().nbytes() for one in gathered.values())
    return [digest.hexdigest(), losses, owner.summary.divided, len(gradients), memory]


@of_bits
def training() -> Any:
    """Several calls and backwards of a step, penalties, clipping, hooks, and evaluations."""
    torch.manual_seed(0)
    model = divided(Parts())
    trained = [one for one in model.parameters() if one.requires_grad]
    trained[0].register_hook(lambda gradient: gradient * 0.5 + gradient.norm())
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = []
    for number in range(5):
        optimizer.zero_grad()
        penalty = sum(one.pow(2).sum() for one in trained)
        loss = model(sequences(number)).pow(2).mean() + model(sequences(number + 1)).mean() + 0.01 * penalty
        loss.backward()
        model(sequences(number + 2)).exp().mean().backward()
        losses += [float(loss.detach()), float(nn.utils.clip_grad_norm_(trained, 0.3))]
        optimizer.step()
        with torch.no_grad():
            losses.append(float(model(sequences(number + 3)).sum()))
        if number == 2:
            model.frozen.requires_grad_(True)
    return bits_of(model, losses)


@of_bits
def gradients_of_gradients() -> Any:
    model = divided(network())
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        x = batch(number).requires_grad_()
        (slopes,) = torch.autograd.grad(model(x).pow(2).mean(), x, create_graph=True)
        optimizer.zero_grad()
        (model(batch(number + 1)).pow(2).mean() + slopes.pow(2).sum()).backward(retain_graph=True)
        losses.append(float(slopes.detach().norm()))
        optimizer.step()
    return bits_of(model, losses)[:-1]  # parameters stay complete after a graph of gradients


@of_bits
def halves() -> Any:
    """Weights of 16 bits, whose operations round differently in vectors."""
    torch.manual_seed(0)
    model = divided(nn.Sequential(nn.Linear(6, 37), nn.Tanh(), nn.Linear(37, 3)).bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number in range(4):
        loss = model(batch(number).bfloat16()).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return bits_of(model, losses)


@of_bits
def stale_graph() -> Any:
    """A backward through weights that a step has changed is an error, as in the plain loop."""
    model = divided(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        loss = model(batch(number)).pow(2).mean()
        loss.backward(retain_graph=True)
        optimizer.step()
    return error_code(loss.backward)


def train(folder: Path, strategy: str, replicate: int, steps: int) -> list[Any]:
    """Train with checkpoints for some steps at most; return the losses, and a sum of the weights at the end."""
    torch.set_default_dtype(torch.float64)
    View.divides_small_calls = True
    config = None if strategy == "ddp" else configuration(strategy, replicate)
    model: Any = samestep.parallel(network(), strategy=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(44, 6, generator=generator), torch.randint(0, 3, (44,), generator=generator)
    )
    batches = samestep.loader(data, batch_size=11, seed=3)
    checkpoints = samestep.CheckpointManager(folder, model, batches, optimizer=optimizer)
    losses = []
    for _ in checkpoints.epochs(EPOCHS):
        for inputs, targets in batches:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                return losses
    return losses


def losses_with(
    options: dict[str, Any], reduction: Literal["fast", "exact"] = "fast", tensor_slices: int = 1
) -> list[float]:
    """Train a few steps with options of the strategy, by default `fsdp`; return the losses."""
    torch.set_default_dtype(torch.float64)
    View.divides_small_calls = True
    samestep.init(strategy=StrategyConfig(**{"name": "fsdp", **options}), reduction=reduction)
    model = samestep.parallel(network(), reduction=reduction, tensor_slices=tensor_slices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(4):
        loss = model(batch(number)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


Layout = tuple[int, str, int]  # ranks, strategy, replicas
LAYOUTS = [
    pytest.param((2, "fsdp", 1)),
    pytest.param((3, "fsdp", 1), marks=pytest.mark.long),
    pytest.param((4, "hsdp", 2), marks=pytest.mark.slow),
]
TENSOR = (2, "tp", 1)


# Without those that differentiate gradients again.
ONE_ORDER = [name for name in COMPARED if name not in ("gradient_penalty", "squares_of_gradients")]
GRADIENTS = [pytest.param((2, "fsdp", 1), marks=pytest.mark.long), *LAYOUTS[1:]]


@pytest.fixture(scope="module", params=GRADIENTS)
def results(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    ranks, strategy, replicate = request.param
    names = [*ONE_ORDER, *SEVERAL, "a_row_that_fails"]
    return results_of_ranks(ranks, names, strategy=strategy, replicate=replicate)


@pytest.mark.parametrize("name", ONE_ORDER)
def test_gradients_are_those_of_the_plain_loop(results: dict[str, list[Any]], name: str) -> None:
    require_gradients(results[name], *COMPARED[name])


@pytest.mark.parametrize("name", SEVERAL)
def test_variants_have_the_gradients_of_the_plain_loop(results: dict[str, list[Any]], name: str) -> None:
    require_forms(results[name], SEVERAL[name], divided=3)


def test_a_row_that_fails_ends_no_rank(results: dict[str, list[Any]]) -> None:
    for found in results["a_row_that_fails"]:
        assert isinstance(found, list), found
        for deviation, divided, _ in found:
            assert deviation <= TOLERANCE
            assert divided >= 9


@pytest.fixture(scope="module", params=[*LAYOUTS, TENSOR])
def states(request: pytest.FixtureRequest, on_ranks: RankServer) -> tuple[Layout, dict[str, list[Any]]]:
    ranks, strategy, replicate = request.param
    return request.param, on_ranks(run, ranks, strategy=strategy, replicate=replicate)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full_state", [True, True, True, True]),
        ("gradient_norm", True),
        ("stale_optimizer", "E_OPTIMIZER"),
        ("divided_twice", "E_INCOMPATIBLE"),
        ("replaced_parameter", "E_INCOMPATIBLE"),
        ("gradients_differentiated_again", None),
        ("unused_backward", True),
        ("numbers_of_parameters", True),
        ("optimizer_with_sums", True),
        ("sums_written_in_place", True),
        ("writes", []),
        ("state_from_before", True),
        ("assigned_data", True),
        ("other_shapes", ["E_INCOMPATIBLE"] * 3),
        ("deferred_sums", True),
        ("overflow_in_one_part", True),
        ("moving_average", True),
        ("penalty_with_attention", True),
        ("functional_parameters", True),
        ("another_type", [True, "RuntimeError", 0]),
        ("graphs_from_before_a_step", True),
        ("saved_parameters", [True, "E_RANK_DESYNC"]),
    ],
)
def test_state_of_divided_parameters(states: tuple[Layout, dict[str, list[Any]]], name: str, expected: Any) -> None:
    layout, results = states
    if name == "gradients_differentiated_again":
        expected = "none" if layout == TENSOR else "E_INCOMPATIBLE"
    for found in results[name]:
        assert found == expected, found


def test_each_rank_has_a_part(states: tuple[Layout, dict[str, list[Any]]]) -> None:
    (ranks, _, replicate), found = states
    shards = ranks // replicate
    rows = {2: [4, 4], 3: [3, 3, 2]}[shards]
    for rank, (elements, has_values, same_class, name) in enumerate(found["parts"]):
        assert elements == 6 * rows[rank % shards]
        assert (has_values, same_class, name) == (True, False, "Sequential")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        [(1, "ddp", 1, 1), (2, "fsdp", 1, 1), (4, "hsdp", 2, 1)],
        [(1, "ddp", 1, 2), (2, "tp", 1, 2)],
        pytest.param([(8, "ddp", 1, 1), (3, "fsdp", 1, 1), (5, "fsdp", 1, 1)], marks=pytest.mark.long),
    ],
)
def test_exact_has_the_bits_of_one_process(layouts: list[tuple[int, str, int, int]], on_ranks: RankServer) -> None:
    """Require equal results without failures, divided calls, and no complete parameters after the last call."""
    first, *others = (
        on_ranks(run_exact, size, strategy=strategy, replicate=replicate, slices=slices)
        for size, strategy, replicate, slices in layouts
    )
    assert first["stale_graph"][0] == "RuntimeError"
    for name in ("training", "gradients_of_gradients", "halves"):
        assert isinstance(first[name][0], list), first[name][0]
        assert first[name][0][2] >= 4  # divided calls
        assert first[name][0][4:] in ([], [0])
    for found in others:
        for name, expected in first.items():
            assert found[name] == [expected[0]] * len(found[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMPARED if name != "random_layers"])
def test_exact_gradients_are_those_of_the_plain_loop(exact: dict[str, list[Any]], name: str) -> None:
    require_gradients(exact[name], *COMPARED[name])


@pytest.fixture(scope="module")
def exact() -> dict[str, list[Any]]:
    names = [*COMPARED, *SEVERAL]
    return results_of_ranks(3, names, strategy="fsdp", reduction="exact")


@pytest.mark.slow
def test_checkpoints_resume_under_another_layout(tmp_path: Path) -> None:
    arguments = [("ddp", 1, 5, 2), ("fsdp", 1, 5, 3), ("hsdp", 2, 2, 4), ("ddp", 1, 4, 2)]
    plain = samestep.launch(train, tmp_path / "plain", "ddp", 1, 12, processes=1)
    losses: list[float] = []
    for strategy, replicate, steps, ranks in arguments:
        own = samestep.launch(train, tmp_path / "run", strategy, replicate, steps, processes=ranks)
        epoch = 4 * (len(losses) // 4)  # saved at the end of each epoch
        losses = losses[:epoch] + own
    assert losses == pytest.approx(plain, abs=1e-10)


@pytest.mark.slow
def test_offload_changes_no_result() -> None:
    options = {"offload": True}
    plain, divided = (samestep.launch(losses_with, options, processes=size) for size in (1, 2))
    assert divided == pytest.approx(plain, abs=1e-10)
    exact = [samestep.launch(losses_with, options, "exact", processes=size) for size in (1, 2)]
    assert exact[0] == exact[1]
    assert exact[0] == pytest.approx(plain, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({"gather": "bf16"}, ("exact",)),
        ({"name": "ddp", "hook": "bf16"}, ("exact",)),
        ({}, ("fast", 2)),  # slices of products
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], others: tuple[Any, ...]) -> None:
    with pytest.raises(SamestepError) as error:
        samestep.launch(losses_with, options, *others, processes=2)
    assert error.value.code == "E_INCOMPATIBLE"
