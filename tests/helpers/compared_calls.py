"""Divided calls on real ranks, compared with the plain loop; each check returns a JSON value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samestep
from helpers.forked_ranks import Job, run_jobs
from helpers.view_checks import deviation, difference, error_code, gradients, run_checks
from samestep.config import MeshConfig, StrategyConfig
from samestep.parallelize import parallel_module
from samestep.view.messages import Ranks

ROWS = 11


CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def run(
    names: list[str], strategy: str = "ddp", replicate: int = 1, reduction: Literal["fast", "exact"] = "fast"
) -> dict[str, list[Any]]:
    """Return the results of the named checks on each rank."""
    config = None
    if strategy != "ddp":
        config = StrategyConfig(name=strategy, mesh=MeshConfig(replicate=replicate))  # type: ignore[arg-type]
    return run_checks({name: CHECKS[name] for name in names}, config, reduction)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def of_steps(step: Callable[[nn.Module, int], Any], steps: int = 4) -> Callable[[nn.Module], Iterator[Tensor | None]]:
    """Return a script of several steps with an optimizer, which yields all gradients and the parameters at the end."""

    def script(model: nn.Module) -> Iterator[Tensor | None]:
        # Not Adam, which makes steps of gradients that are nothing but rounding (of a bias before batch norm).
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01)
        for number in range(steps):
            optimizer.zero_grad()
            yield from step(model, number) or ()
            yield from gradients(model)
            optimizer.step()
        yield from model.parameters()
        yield from model.buffers()

    return script


@check
def several_calls() -> Any:
    def step(model: nn.Module, number: int) -> None:
        losses = [model(batch(number + index, rows)).pow(2).mean() for index, rows in enumerate((11, 8, 13))]
        torch.stack(losses).sum().backward()

    return deviation(network(), of_steps(step))


@check
def parameters_used_outside() -> Any:
    def step(model: nn.Module, number: int) -> None:
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        (model(batch(number)).pow(2).mean() + 0.1 * penalty).backward()

    return deviation(network(), of_steps(step))


@check
def frozen_parts() -> Any:
    model: Any = network()
    model[0].requires_grad_(False)

    def step(model: nn.Module, number: int) -> None:
        model(batch(number)).pow(2).mean().backward()

    return deviation(model, of_steps(step))


class Unused(nn.Module):
    """A network with a layer that no call uses, and one that some rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.used = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@check
def absent_gradients() -> Any:
    def step(model: nn.Module, number: int) -> Iterator[Tensor | None]:
        model(batch(number)).pow(2).mean().backward()
        yield from [parameter.grad for parameter in model.unused.parameters()]

    return deviation(Unused(), of_steps(step))


@check
def graph_kept() -> Any:
    def step(model: nn.Module, number: int) -> None:
        loss = model(batch(number)).pow(2).mean()
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    return deviation(network(), of_steps(step))


@check
def gradients_of_some_parameters() -> Any:
    def step(model: nn.Module, number: int) -> Iterator[Tensor]:
        model(batch(number)).pow(2).mean().backward()
        parameters = list(model.parameters())
        for chosen in ([0], [5], [3, 1], [4, 0]):
            loss = model(batch(number + 1)).pow(2).mean()
            yield from torch.autograd.grad(loss, [parameters[index] for index in chosen])

    return deviation(network(), of_steps(step))


@check
def gradients_of_inputs_start_no_sum() -> Any:
    started = []
    original = Ranks.start_sum
    Ranks.start_sum = lambda self, values: started.append(1) or original(self, values)
    counts = []

    def step(model: nn.Module, number: int) -> Iterator[Tensor]:
        before = len(started)
        x = batch(number).requires_grad_()
        yield torch.autograd.grad(model(x).pow(3).mean(), x)[0]
        counts.append(len(started) - before)
        model(batch(number)).pow(2).mean().backward()
        counts.append(len(started) - before)

    try:
        found = deviation(network(), of_steps(step))
    finally:
        Ranks.start_sum = original
    return [found, counts[-4:]]


@check
def gradient_penalty() -> Any:
    def step(model: nn.Module, number: int) -> Iterator[Tensor]:
        x = batch(number).requires_grad_()
        y = model(x)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (y.mean() + (first.norm(dim=1) - 1).pow(2).mean()).backward()
        assert x.grad is not None
        yield x.grad

    return deviation(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), of_steps(step))


@check
def squares_of_gradients() -> Any:
    def step(model: nn.Module, number: int) -> None:
        loss = model(batch(number)).pow(2).mean()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + torch.stack([gradient.pow(2).sum() for gradient in first]).sum()).backward()

    return deviation(network(), of_steps(step))


@check
def hooks_of_parameters() -> Any:
    def script(model: nn.Module) -> Iterator[Tensor | None]:
        seen: list[Tensor] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
            parameter.register_post_accumulate_grad_hook(lambda own: seen.append(own.grad.clone()))
        for number in range(4):
            model.zero_grad()
            (model(batch(number)).pow(2).mean() + model(batch(number + 1)).mean()).backward()
            yield torch.tensor(len(seen))
        # Their order depends on the order of the nodes of a graph.
        yield from sorted(seen[-12:], key=lambda one: (one.numel(), float(one.sum())))

    return deviation(network(), script)


@check
def gradients_are_buckets() -> Any:
    memory = []
    original = Ranks.start_sum

    def start_sum(self: Ranks, values: Tensor) -> Any:
        memory.append(values.untyped_storage().data_ptr())
        return original(self, values)

    Ranks.start_sum = start_sum
    model = samestep.parallel(network())
    for number in range(3):
        model.zero_grad()
        model(batch(number)).sum().backward()
    Ranks.start_sum = original
    return [one.grad.untyped_storage().data_ptr() in memory for one in model.parameters() if one.grad is not None]


@check
def layouts_and_dtypes() -> Any:
    def step(model: nn.Module, number: int) -> Iterator[Tensor]:
        x = torch.randn(ROWS, 3, 5, 5, generator=torch.Generator().manual_seed(number))
        model(x).pow(2).mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            yield torch.tensor(parameter.grad.stride())

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.scale = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.complex128))
            self.head = nn.Linear(4 * 9, 4)
            self.tail = nn.Linear(4, 2)
            self.tail.weight = nn.Parameter(self.head.weight[:2, :4].detach().t().contiguous().t())

        def forward(self, x: Tensor) -> Tensor:
            y = self.convolution(x)
            y = (y * self.scale).abs()
            return self.tail(self.head(y.flatten(1)))

    return deviation(Mixed(), of_steps(step))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.recurrent = nn.GRU(6, 6, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


@check
def tied_and_recurrent() -> Any:
    def step(model: nn.Module, number: int) -> None:
        tokens = torch.randint(7, (ROWS, 4), generator=torch.Generator().manual_seed(number))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    return deviation(Tied(), of_steps(step))


@check
def checkpointing() -> Any:
    """The inner graph: reentrant and not, with dropout and batch norm inside, kept and freed graphs."""

    class Checkpointed(nn.Module):
        def __init__(self, *, reentrant: bool) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))
            self.reentrant = reentrant
            self.last = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.first(x))
            y = checkpoint(self.inner, y, use_reentrant=self.reentrant)
            return self.last(y)

    def step(model: nn.Module, number: int) -> Iterator[Tensor]:
        x = batch(number).requires_grad_()
        (model(x).pow(2).mean() + model(batch(number + 1)).mean()).backward()
        assert x.grad is not None
        yield x.grad

    return [deviation(Checkpointed(reentrant=reentrant), of_steps(step)) for reentrant in (True, False)]


@check
def random_layers() -> Any:
    def step(model: nn.Module, number: int) -> Iterator[Tensor]:
        y = model(batch(number))
        (y * torch.rand_like(y)).mean().backward()
        yield torch.rand(2)

    return deviation(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3)), of_steps(step))


def _accumulate(model: nn.Module, number: int, *, deferred: bool, outside: bool = False) -> None:
    for part in range(3):
        block = samestep.no_sync(model) if deferred and part < 2 else samestep.no_sync(nn.Identity())
        with block:
            loss = model(batch(3 * number + part)).pow(2).mean()
            if outside:
                loss = loss + sum(one.pow(2).sum() for one in model.parameters())
            loss.backward()


@check
def accumulation() -> Any:
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)  # a zero has no gradient outside of calls, which looks like a zeroed one
    return [
        deviation(
            copy.deepcopy(model),
            of_steps(lambda model, number: _accumulate(model, number, deferred=deferred, outside=outside)),  # noqa: B023
        )
        for deferred in (False, True)
        for outside in (False, True)
    ]


@check
def unused_parameters_with_no_sync() -> Any:
    return deviation(Unused(), of_steps(lambda model, number: _accumulate(model, number, deferred=True)))


@check
def zeroed_inside_of_no_sync() -> Any:
    def step_with(to_none: bool) -> Callable[[nn.Module, int], None]:
        def step(model: nn.Module, number: int) -> None:
            with samestep.no_sync(model):
                model(batch(number)).pow(2).mean().backward()
                model.zero_grad(set_to_none=to_none)
                model(batch(number + 1)).pow(2).mean().backward()
                model(batch(number + 2)).pow(2).mean().backward()
            model(batch(number + 3)).pow(2).mean().backward()

        return step

    return [deviation(network(), of_steps(step_with(to_none))) for to_none in (True, False)]


@check
def gradients_zeroed_in_place_before_no_sync() -> Any:
    def script(model: nn.Module) -> Iterator[Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            optimizer.zero_grad(set_to_none=False)
            _accumulate(model, number, deferred=True)
            yield from gradients(model)
            optimizer.step()

    return deviation(network(), script)


@check
def step_with_pending_gradients() -> Any:
    model = samestep.parallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        model(batch(number)).pow(2).mean().backward()
        optimizer.step()
    with samestep.no_sync(model):
        model(batch(4)).pow(2).mean().backward()
    before = error_code(optimizer.step)
    model(batch(5)).pow(2).mean().backward()
    return [before, error_code(optimizer.step)]


def _change(model: Any, number: int) -> None:
    if number == 3:
        model[0].weight.data = model[0].weight.data * 0.5
    elif number == 5:
        model[0].requires_grad_(False)
    elif number == 8:
        model[0].requires_grad_(True)
    elif number == 11:
        model.append(nn.Linear(3, 2).requires_grad_(True))
        with torch.no_grad():
            model[-1].weight.fill_(0.3)
            model[-1].bias.fill_(0.1)
    elif number == 14:
        model[0] = nn.utils.parametrizations.weight_norm(copy.deepcopy(model[0]))
    elif number == 17:
        model.eval()


@check
def changed_module() -> Any:
    def script(model: nn.Module) -> Iterator[Tensor | None]:
        for number in range(20):
            _change(model, number)
            model.zero_grad()
            model(batch(number)).pow(2).mean().backward()
            yield from gradients(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.05 * parameter.grad)

    return deviation(network(), script)


@check
def small_batches() -> Any:
    size = samestep.init().size
    model = samestep.parallel(nn.Linear(6, 3))
    owner = parallel_module(model)
    assert owner is not None
    for number in range(3):
        model(batch(number))
    before = owner.summary.divided
    found = model(batch(0, size - 1))
    expected = nn.functional.linear(batch(0, size - 1), model.weight, model.bias)
    return [torch.equal(found, expected), owner.summary.divided - before, owner.summary.whole]


@check
def strict() -> Any:
    size = samestep.init().size

    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    joined = samestep.parallel(Joined(), strict=True)
    good = samestep.parallel(nn.Linear(6, 3), strict=True)
    codes = [error_code(lambda: joined(batch(0))) for _ in range(3)]
    codes += [error_code(lambda: good(batch(0))) for _ in range(3)]
    return [*codes, error_code(lambda: good(batch(0, size - 1)))]


@check
def local_batch_norm() -> Any:
    """Statistics are those of the own rows."""
    model = samestep.parallel(nn.Sequential(nn.BatchNorm1d(6)), batch_norm="local", microbatches=8)
    plain = nn.BatchNorm1d(6)
    owner = parallel_module(model)
    assert owner is not None
    for number in range(3):
        found = model(batch(number, 16))
    x = batch(2, 16)
    size = samestep.init().size
    bounds = [(16 * (8 * rank // size) // 8, 16 * (8 * (rank + 1) // size) // 8) for rank in range(size)]
    expected = torch.cat([plain(x[start:stop]) for start, stop in bounds])
    return [owner.summary.divided, difference([expected], [found])]


class Tokens(nn.Module):
    """Fails at a row with a number that is not in its table."""

    def __init__(self, *, normalised: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4) if normalised else nn.Identity()
        self.table = nn.Embedding(5, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)) + self.table(tokens)))


@check
def a_row_that_fails() -> Any:
    """The script's own exception on all ranks; caught, the loop goes on as the plain one."""
    size = samestep.init().size

    def step(model: nn.Module, number: int) -> Iterator[Tensor]:
        for part in range(3):
            tokens = torch.arange(ROWS) % 5
            if part == 1 and number > 0:  # a trial that fails would leave nothing to divide
                tokens[ROWS * (8 * (number % size) // size) // 8] = 9  # first row of a rank
            try:
                model(batch(number + part), tokens).pow(2).mean().backward()
            except IndexError:
                yield torch.tensor(1)
            else:
                yield torch.tensor(0)

    return [deviation(Tokens(normalised=normalised), of_steps(step, steps=5)) for normalised in (False, True)]


def _fails_in_step(compute: Callable[[nn.Module, torch.optim.Optimizer, int], Any]) -> str:
    model = samestep.parallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        model(batch(number)).pow(2).mean().backward()
        optimizer.step()
    return error_code(lambda: compute(model, optimizer, samestep.init().rank))


def other_action() -> Any:
    """The last rank steps where the others begin a call."""

    def compute(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        if rank == samestep.init().size - 1:
            optimizer.step()
        else:
            model(batch(0))

    return _fails_in_step(compute)


def other_backward() -> Any:
    """One rank does not call backward."""

    def compute(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        loss = model(batch(0)).pow(2).mean()
        if rank != 1:
            loss.backward()
        optimizer.step()

    return _fails_in_step(compute)


def other_values() -> Any:
    def compute(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        model(batch(0) + (rank == 2))

    return _fails_in_step(compute)


def other_kind() -> Any:
    def compute(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        x = batch(0).requires_grad_(rank == 1)
        for _ in range(2):
            model(x).sum().backward()

    return _fails_in_step(compute)


def other_mode() -> Any:
    def compute(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        model.train(rank != 0)
        for _ in range(3):
            model(batch(0)).sum().backward()

    return _fails_in_step(compute)


def other_loss() -> Any:
    def compute(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        (model(batch(0)).sum() * (1 + (rank == 2))).backward()

    return _fails_in_step(compute)


def other_rate() -> Any:
    def compute(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * (rank == 1)
        model(batch(0)).sum().backward()
        optimizer.step()

    return _fails_in_step(compute)


def other_parameters() -> Any:
    torch.manual_seed(samestep.init().rank == 1)
    return error_code(lambda: samestep.parallel(network()))


def end_of_one_rank() -> Any:
    """One rank ends its block while the others call the model."""

    def compute() -> None:
        with samestep.init() as world:
            model = samestep.parallel(network())
            for number in range(3 if world.rank == 1 else 4):
                model(batch(number)).sum().backward()

    return error_code(compute)


def end_of_all_ranks() -> Any:
    def compute() -> None:
        with samestep.init():
            model = samestep.parallel(network())
            for number in range(3):
                model(batch(number)).sum().backward()

    return error_code(compute)


def run_difference(name: str) -> list[Any]:
    """Return the result of one of `DIFFERENCES` on each rank; the ranks are not in step afterwards."""
    found = run_checks({name: globals()[name]})
    return found[name]


def run_end(name: str, folder: str) -> None:
    """Write the result of `end_of_...` on this rank to a file: no exchange is possible afterwards."""
    import os
    from pathlib import Path

    from samestep.view.view import View

    torch.set_default_dtype(torch.float64)
    View.divides_small_calls = True
    rank = os.environ["RANK"]
    Path(folder, rank).write_text(globals()[name](), encoding="utf-8")


# --- in tests ----------------------------------------------------------------------------------------

TOLERANCE = 1e-12
# Divided calls at least, and calls after the trial that are whole.
COMPARED = {
    "several_calls": (11, 0),
    "parameters_used_outside": (3, 0),
    "frozen_parts": (3, 0),
    "absent_gradients": (3, 0),
    "graph_kept": (3, 0),
    "gradients_of_some_parameters": (19, 0),
    "gradient_penalty": (3, 0),
    "squares_of_gradients": (3, 0),
    "hooks_of_parameters": (7, 0),
    "layouts_and_dtypes": (3, 0),
    "tied_and_recurrent": (3, 0),
    "random_layers": (3, 0),
}
# Forms of a check.
SEVERAL = {
    "checkpointing": 2,
    "accumulation": 4,
}


def results_of_ranks(ranks: int, names: Sequence[str], **options: Any) -> dict[str, list[Any]]:
    """Return the result of each rank by the name of the check."""
    job = Job("run", ranks, {"names": list(names), **options})
    (results,) = run_jobs("helpers.compared_calls", job, timeout=400)
    return results


def require_gradients(results: Sequence[Any], divided: int, whole: int) -> None:
    """Require equal gradients, at least `divided` divided calls, and `whole` whole ones after the trial."""
    for result in results:
        assert isinstance(result, list), result
        assert result[0] <= TOLERANCE
        assert result[1] >= divided
        assert result[2] == whole


def require_forms(results: Sequence[Any], forms: int, divided: int) -> None:
    """Require equal gradients in all forms of a check, each with at least `divided` divided calls and no whole one."""
    for result in results:
        assert isinstance(result, list), result
        assert len(result) == forms
        for form in result:
            require_gradients([form], divided, 0)
