"""Parts of a divided call in lock step: totals, order of the nodes that threads have made, modes of threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from samestep.view.crossings import totals
from samestep.view.slice_threads import AllHere, OutOfStep, Part, ThreadModes, nodes_of, order_nodes, run_in_lockstep

VARIABLE = ContextVar("variable", default=0)


def run(*computes: Callable[[Part], Any]) -> list[Any]:
    parts = [Part(compute, nullcontext) for compute in computes]
    before = threading.active_count()
    try:
        return run_in_lockstep(parts, AllHere())
    finally:
        assert threading.active_count() == before


def test_each_part_gets_the_total() -> None:
    results = run(*(lambda part, n=n: part.join(totals, torch.tensor([n])).item() for n in range(4)))
    assert results == [6, 6, 6, 6]


def test_parts_without_totals_run_to_their_ends() -> None:
    assert run(lambda part: 1, lambda part: 2) == [1, 2]


def test_gradients_go_to_all_parts() -> None:
    x = torch.arange(3.0, dtype=torch.float64).requires_grad_()

    def compute(index: int) -> Callable[[Part], Any]:
        return lambda part: (part.join(totals, x[index] ** 2) * (index + 1)).exp()

    results = run(*(compute(index) for index in range(3)))
    (gradient,) = torch.autograd.grad(results, x)
    (expected,) = torch.autograd.grad(sum(((x**2).sum() * (index + 1)).exp() for index in range(3)), x)
    assert torch.allclose(gradient, expected)


def test_a_part_may_write_into_its_total() -> None:
    assert run(*(lambda part, n=n: part.join(totals, torch.ones(1)).mul_(n).item() for n in (1, 10))) == [2, 20]


def test_no_graph_without_grad() -> None:
    x = torch.ones(1, requires_grad=True)

    def compute(part: Part) -> bool:
        with torch.no_grad():
            return part.join(totals, x).requires_grad

    assert run(compute, compute) == [False, False]


def test_one_part_runs_at_a_time_in_order() -> None:
    events: list[str] = []

    @contextmanager
    def turn() -> Iterator[None]:
        events.append("(")
        yield
        events.append(")")

    def compute(name: str) -> Callable[[Part], None]:
        def run_part(part: Part) -> None:
            events.append(name)
            part.join(totals, torch.ones(1))
            events.append(name.upper())

        return run_part

    run_in_lockstep([Part(compute(name), turn) for name in "abc"], AllHere())
    assert "".join(events) == "(a)(b)(c)(A)(B)(C)"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_failing_part_ends_all(position: int) -> None:
    reached = []

    def compute(index: int) -> Callable[[Part], None]:
        def run_part(part: Part) -> None:
            part.join(totals, torch.ones(1))
            if index == position:
                raise KeyError(index)
            part.join(totals, torch.ones(1))
            reached.append(index)

        return run_part

    with pytest.raises(KeyError):
        run(*(compute(index) for index in range(3)))
    assert not reached


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (2, 3), (1, 1, 2)])
def test_other_numbers_of_totals_are_refused(counts: tuple[int, ...]) -> None:
    def compute(count: int) -> Callable[[Part], None]:
        return lambda part: [part.join(totals, torch.ones(1)) for _ in range(count)] and None

    with pytest.raises(OutOfStep, match="numbers of values"):
        run(*(compute(count) for count in counts))


@pytest.mark.parametrize("others", [torch.ones(2), torch.ones(1, dtype=torch.float64)])
def test_other_shapes_and_dtypes_are_refused(others: torch.Tensor) -> None:
    with pytest.raises(OutOfStep, match="shapes or dtypes"):
        run(lambda part: part.join(totals, torch.ones(1)), lambda part: part.join(totals, others))


def test_a_script_that_catches_everything_ends_too() -> None:
    def stubborn(part: Part) -> None:
        for _ in range(3):
            try:
                part.join(totals, torch.ones(1))
            except BaseException:  # as scripts do
                continue

    def fails(part: Part) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        run(stubborn, fails)


def test_a_failing_turn_ends_all() -> None:
    @contextmanager
    def turn() -> Iterator[None]:
        raise RuntimeError("no turn")
        yield

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no turn"):
        run_in_lockstep(
            [Part(lambda part: part.join(totals, torch.ones(1)), nullcontext), Part(lambda part: None, turn)], AllHere()
        )
    assert threading.active_count() == before


def test_context_variables_of_the_caller_hold_and_those_of_a_part_are_its_own() -> None:
    token = VARIABLE.set(5)

    def compute(part: Part) -> int:
        VARIABLE.set(VARIABLE.get() + 1)
        part.join(totals, torch.ones(1))
        return VARIABLE.get()

    try:
        assert run(compute, compute) == [6, 6]
        assert VARIABLE.get() == 5
    finally:
        VARIABLE.reset(token)


def dense(x: torch.Tensor, weights: list[torch.Tensor], part: Part | None) -> torch.Tensor:
    """Compute layers that see all results before; a join follows each."""
    seen = [x]
    for weight in weights:
        inputs = sum(seen[1:], seen[0])
        result = torch.tanh(inputs @ weight)
        total = result.sum(0)
        if part is not None:
            total = part.join(totals, total)
        seen.append(result + 0.1 * total)
    return sum(seen[1:], seen[0])


def of_slices(count: int) -> tuple[list[int], list[Any]]:
    """Return the numbers of the nodes of the first slice, in the order of a walk, and the gradients of its weights."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(6, 6, generator=generator) / 3 for _ in range(6)]
    slices = [torch.randn(4, 6, generator=generator) for _ in range(4)][:count]
    own = [[weight.clone().requires_grad_() for weight in weights] for _ in slices]
    inputs = [x.clone().requires_grad_() for x in slices]
    parts = [Part(partial(dense, x, one), nullcontext) for x, one in zip(inputs, own, strict=True)]
    before = torch._C._autograd._get_sequence_nr()
    outputs = run_in_lockstep(parts, AllHere())
    order_nodes(parts, outputs, nodes_of(inputs))
    numbers = []
    todo = [outputs[0].grad_fn]
    while todo:
        node = todo.pop(0)
        if node is not None and "AccumulateGrad" not in node.name():
            numbers.append(node._sequence_nr())
            todo += [below for below, _ in node.next_functions]
    assert min(numbers) >= before
    assert max(numbers) < torch._C._autograd._get_sequence_nr()
    return numbers, outputs


def test_a_node_is_above_all_that_it_uses() -> None:
    _, outputs = of_slices(3)
    seen = set()
    todo = [output.grad_fn for output in outputs]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for below, _ in node.next_functions:
            if below is not None and "AccumulateGrad" not in below.name():
                assert below._sequence_nr() < node._sequence_nr()
                todo.append(below)
    assert len({node._sequence_nr() for node in seen}) == len(seen)


def test_the_order_within_a_slice_does_not_depend_on_the_number_of_slices() -> None:
    orders = []
    for count in (1, 2, 4):
        numbers, _ = of_slices(count)
        # A walk of several slices meets nodes of the others too, at joins: the first nodes are those of one slice.
        own = numbers[:20]
        orders.append(sorted(range(len(own)), key=own.__getitem__))
    assert orders[1:] == orders[:1] * 2


CPU = torch.device("cpu")


def in_thread(modes: ThreadModes) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def compute() -> None:
        with modes.installed():
            x = torch.ones(2, 2, requires_grad=True)
            y = x @ x
            found.update(
                grad=y.requires_grad,
                dtype=y.dtype,
                inference=torch.is_inference_mode_enabled(),
                device=torch.ones(1).device.type,
            )

    thread = Thread(target=compute)
    thread.start()
    thread.join()
    return found


def test_plain_modes() -> None:
    expected = {"grad": True, "dtype": torch.float32, "inference": False, "device": "cpu"}
    assert in_thread(ThreadModes(CPU)) == expected


def test_modes_of_the_caller() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = in_thread(ThreadModes(CPU))
    assert (found["grad"], found["dtype"]) == (False, torch.bfloat16)
    with torch.inference_mode():
        assert in_thread(ThreadModes(CPU))["inference"]
    with torch.device("meta"):
        assert in_thread(ThreadModes(CPU))["device"] == "meta"


def test_hooks_of_saved_tensors() -> None:
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        modes = ThreadModes(CPU)
    in_thread(modes)
    assert packed == [torch.Size([2, 2])] * 2
