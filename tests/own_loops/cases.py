"""Cases of own loops: expected outcomes, and the ranks that run them.

A case is a function of a `Setting`. Its result is hashed on every rank and compared between ranks and numbers of
processes. Two outcomes exist: the same result everywhere, or a refusal with one error code everywhere.
"""

import hashlib
import random
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch

import samestep
from samestep.errors import SamestepError

PROCESSES = (1, 2, 3, 4)
SAME = "same"


@dataclass(frozen=True)
class Setting:
    """The surroundings of one case.

    Attributes:
        world: all ranks.
        folder: an empty folder, the same on every rank.
    """

    world: samestep.World
    folder: Path


Case = Callable[[Setting], Any]


def same(case: Case) -> Case:
    """Declare a case with the same result on any number of processes."""
    case.expected = SAME  # type: ignore[attr-defined]
    return case


def refused(code: str) -> Callable[[Case], Case]:
    """Declare a case that ends with the error `code` on any number of processes."""

    def declare(case: Case) -> Case:
        case.expected = code  # type: ignore[attr-defined]
        return case

    return declare


def refused_with_several(code: str) -> Callable[[Case], Case]:
    """Declare a case that is right on one process, and ends with the error `code` on every rank of several.

    The case has its own launch, because its ranks may issue different operations until the end of their world.
    """

    def declare(case: Case) -> Case:
        case.expected, case.is_alone = code, True  # type: ignore[attr-defined]
        return case

    return declare


def each(values: Mapping[str, Any]) -> Callable[[Callable[[Setting, Any], Any]], Case]:
    """Declare one case for each named value, which the function gets as its second argument."""

    def declare(case: Callable[[Setting, Any], Any]) -> Case:
        case.values = values  # type: ignore[attr-defined]
        return case  # type: ignore[return-value]

    return declare


def cases_of(module: str) -> dict[str, Case]:
    """Return the cases of a module by name, in the order of the file."""
    cases: dict[str, Case] = {}
    for name, case in vars(import_module(module)).items():
        if not hasattr(case, "expected") or case.__module__ != module:
            continue
        if not hasattr(case, "values"):
            cases[name] = case
            continue
        for variant, value in case.values.items():
            cases[variant] = partial(_call, case, value)
            cases[variant].expected = case.expected  # type: ignore[attr-defined]
    return cases


def _call(case: Callable[[Setting, Any], Any], value: Any, setting: Setting) -> Any:
    return case(setting, value)


def run_cases(module: str, names: Sequence[str], folder: Path) -> list[str]:
    """Run cases one after another on every rank, and write one outcome per case and rank into `folder`.

    Rank 0 appends the names of begun cases to `begun`: if the ranks end, the last one is the cause.
    """
    cases = cases_of(module)
    with samestep.start() as world:
        for name in names:
            if world.is_main:
                with (folder / "begun").open("a") as file:
                    file.write(f"{name}\n")
            random.seed(0)
            numpy.random.seed(0)
            torch.manual_seed(0)
            own = folder / name
            own.mkdir(exist_ok=True)
            world.barrier()
            outcome = _outcome(cases[name], Setting(world, own))
            (folder / f"{name}.{world.rank}").write_text(outcome)
            world.barrier()
    return list(names)


def run_alone(module: str, name: str, folder: Path) -> None:
    """Run one case in a world of its own on every rank, and write one outcome per rank into `folder`."""
    torch.manual_seed(0)
    rank = 0
    try:
        with samestep.start() as world:
            rank = world.rank
            outcome = f"{SAME} {digest(cases_of(module)[name](Setting(world, folder)))}"
    except SamestepError as error:
        outcome = error.code
    (folder / f"{name}.{rank}").write_text(outcome)


def outcomes(module: str, names: Container[str], processes: int, folder: Path) -> dict[str, list[str]]:
    """Return the outcomes of all ranks by named case. A case that ends the ranks has one outcome, the error."""
    cases, results = {name: case for name, case in cases_of(module).items() if name in names}, {}
    alone = [name for name, case in cases.items() if hasattr(case, "is_alone")]
    for name in alone:
        own = folder / name
        own.mkdir(parents=True)
        failure = "no outcome"
        try:
            samestep.launch(run_alone, module, name, own, processes=processes, hang_after=20)
        except SamestepError as error:
            failure = f"ended: {error}"
        paths = [own / f"{name}.{rank}" for rank in range(processes)]
        results[name] = [path.read_text() if path.exists() else failure for path in paths]
    remaining = [name for name in cases if name not in alone]
    while remaining:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        failure = ""
        try:
            samestep.launch(run_cases, module, remaining, folder, processes=processes, hang_after=20)
        except SamestepError as error:
            failure = f"ended: {error}"
        begun = (folder / "begun").read_text().split()
        for name in begun:
            paths = [folder / f"{name}.{rank}" for rank in range(processes)]
            results[name] = [path.read_text() if path.exists() else failure for path in paths]
        if failure:
            results[begun[-1]] = [failure, *filter(None, (outcome for outcome in results[begun[-1]]))]
        remaining = remaining[len(begun) :]
    return results


def digest(*values: Any) -> str:
    """Return a SHA-256 of nested tensors, modules, optimizers, numbers and text."""
    total = hashlib.sha256()
    for part in _parts(values):
        total.update(part)
    return total.hexdigest()


def _outcome(case: Case, setting: Setting) -> str:
    try:
        return f"{SAME} {digest(case(setting))}"
    except SamestepError as error:
        return error.code


def _parts(value: Any) -> Iterable[bytes]:
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.view(torch.uint8).numpy().tobytes() if value.numel() and value.dim() else repr(value).encode()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _parts(item)
    elif isinstance(value, list | tuple):
        yield f"{len(value)}".encode()
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode()
