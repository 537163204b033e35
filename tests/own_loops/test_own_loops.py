"""Every own loop has its expected outcome on 1, 2, 3 and 4 processes."""

from pathlib import Path
from typing import Any

import pytest

from own_loops.cases import PROCESSES, SAME, cases_of, outcomes

MODULES = sorted(
    f"own_loops.{path.stem}"
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "cases") and not path.stem.startswith("test_")
)
SLOW_PROCESSES = (1, 3)
# Cases with a launch of their own take a second or two each.
_ALONE_PER_SLOW = 12
_OTHERS_PER_SLOW = 5
Outcomes = dict[tuple[str, int], dict[str, list[str]]]


def params() -> list[Any]:
    """Return all cases on all numbers of processes for the long tests, and some cases on two for the slow tests."""
    cases = [(module, name, hasattr(case, "is_alone")) for module in MODULES for name, case in cases_of(module).items()]
    alone = [name for _, name, is_alone in cases if is_alone]
    others = [name for _, name, is_alone in cases if not is_alone]
    left_out = {name for index, name in enumerate(alone) if index % _ALONE_PER_SLOW}
    left_out |= {name for index, name in enumerate(others) if index % _OTHERS_PER_SLOW}
    return [
        pytest.param(module, name, processes, id=f"{module.split('.')[1]}-{name}-{len(processes)}", marks=mark)
        for processes, mark in ((SLOW_PROCESSES, pytest.mark.slow), (PROCESSES, pytest.mark.long))
        for module, name, _ in cases
        if processes == PROCESSES or name not in left_out
    ]


@pytest.fixture(scope="module")
def results() -> Outcomes:
    return {}


@pytest.mark.parametrize(("module", "name", "processes"), params())
def test_outcome(
    results: Outcomes,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    module: str,
    name: str,
    processes: tuple[int, ...],
) -> None:
    items = [item.callspec.params for item in request.session.items if item.path == request.path]
    names = {params["name"] for params in items if params["module"] == module}
    for size in processes:
        if name not in results.get((module, size), {}):
            folder = tmp_path_factory.mktemp("own_loops") / str(size)
            results[module, size] = outcomes(module, names, size, folder)
    by_size = {size: set(results[module, size][name]) for size in processes}
    case = cases_of(module)[name]
    expected = case.expected  # type: ignore[attr-defined]
    with_several = {size: outcome for size, outcome in by_size.items() if size > 1}
    if expected == SAME:
        assert len(set.union(*by_size.values())) == 1, by_size
    else:
        assert all(outcome == {expected} for outcome in with_several.values()), by_size
    if expected == SAME or hasattr(case, "is_alone"):
        assert len(by_size[1]) == 1
        assert next(iter(by_size[1])).startswith(SAME), by_size
    else:
        assert by_size[1] == {expected}
