"""Outermost calls of modules have an owner."""

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from samestep.script.divided_calls import OutermostCalls
from samestep.script.summary import Records
from samestep.view.view import ModuleSummary


class Owner:
    """Owner of a module's calls that adds 100 to their result."""

    def __init__(self, module: nn.Module) -> None:
        self.summary = ModuleSummary(type(module).__name__)
        self.attributes = vars(module)

    def call(self, forward: Callable[..., Any], eager: Callable[..., Any], arguments: Any, options: Any) -> Any:
        assert "forward" not in self.attributes or self.attributes["forward"] is eager
        self.summary.divided += 1
        return forward(*arguments, **options) + 100


class Calls:
    """Installed calls, with the owners that were made."""

    def __init__(self) -> None:
        self.owners: list[Owner] = []
        self.records = Records()
        self.calls = OutermostCalls(self._owner_of, self.records)

    def _owner_of(self, module: nn.Module) -> Any:
        self.owners.append(Owner(module))
        return self.owners[-1]

    @property
    def counts(self) -> list[tuple[str, int]]:
        return [(owner.summary.module, owner.summary.divided) for owner in self.owners]


@pytest.fixture
def calls() -> Iterator[Calls]:
    installed = Calls()
    with installed.calls.installed():
        yield installed


def one() -> nn.Linear:
    """Return a layer that multiplies by 2."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 2.0)
    return layer


def value(result: Any) -> float:
    return float(result.detach())


ONES = torch.ones(1, 1)


def test_forked_process_calls_modules_as_plain_python(calls: Calls) -> None:
    child = os.fork()
    if child == 0:
        os._exit(value(one()(ONES)) != 2.0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert value(one()(ONES)) == 102.0


def test_only_outermost_calls_have_an_owner(calls: Calls) -> None:
    model = nn.Sequential(one(), nn.ReLU(), one())
    assert [value(part(ONES)) for part in (model, model, model[0])] == [104.0, 104.0, 102.0]
    assert calls.counts == [("Sequential", 2), ("Linear", 1)]
    records = [(record.module, record.way, record.calls) for record in calls.records.calls.values()]
    assert records == [("Sequential", "divided", 2), ("Linear", "divided", 1)]


def test_modules_without_parameters_and_wrappers_have_no_owner(calls: Calls) -> None:
    assert value(nn.ReLU()(ONES)) == 1.0
    assert value(nn.DataParallel(one())(ONES)) == 102.0
    assert calls.counts[-1] == ("Linear", 1)


def test_a_module_is_as_before_during_and_after_a_call(calls: Calls) -> None:
    module = one()
    before = dict(vars(module))
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda module, arguments: seen.append(value(arguments[0])))
    module.register_forward_hook(lambda module, arguments, result: seen.append(value(result)))
    assert value(module(ONES)) == 102.0
    assert seen == [1.0, 102.0]  # hooks are outside
    assert vars(module).keys() == before.keys()
    assert type(module) is nn.Linear


def test_a_patched_forward_stays(calls: Calls) -> None:
    module = one()
    patched = module.forward

    def forward(values: torch.Tensor) -> torch.Tensor:
        assert "forward" in vars(copy.deepcopy(module))
        return patched(values) + 10

    module.forward = forward  # type: ignore[method-assign]
    assert value(module(ONES)) == 112.0
    assert vars(module)["forward"] is forward


def test_a_failed_call_leaves_nothing(calls: Calls) -> None:
    module = one()
    hook = module.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(ONES)
    hook.remove()
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(1, 2))
    assert "forward" not in vars(module)
    assert value(module(ONES)) == 102.0


def test_calls_of_other_threads_have_no_owner(calls: Calls) -> None:
    results: list[float] = []
    module = one()
    thread = threading.Thread(target=lambda: results.append(value(module(ONES))))
    thread.start()
    thread.join()
    assert (results, calls.owners) == ([2.0], [])


def test_owners_end_with_their_modules(calls: Calls) -> None:
    module = one()
    module(ONES)
    assert len(calls.calls._owners) == 1
    del module
    calls.owners.clear()
    gc.collect()
    assert not calls.calls._owners


def test_nothing_is_replaced_afterwards() -> None:
    before = nn.Module.__call__
    with Calls().calls.installed():
        assert nn.Module.__call__ is not before
    assert nn.Module.__call__ is before
