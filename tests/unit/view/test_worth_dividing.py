"""The work of a call, and whether dividing it saves more than it costs."""

from typing import Any

import pytest
import torch
from torch import nn

from samestep.view.worth_dividing import WorkCounter, is_worth_dividing


def operations(compute: Any) -> float:
    with WorkCounter() as counter:
        compute()
    return counter.operations


def test_products_are_counted_with_their_inner_dimension() -> None:
    a, b = torch.ones(8, 32), torch.ones(32, 16)
    assert operations(lambda: a @ b) == 2 * 8 * 32 * 16 + 4 * 8 * 16


def test_other_functions_are_counted_by_their_elements() -> None:
    x = torch.ones(7, 3)
    assert operations(x.exp) == 4 * 21
    assert operations(x.sum) == 4


def test_work_grows_with_the_rows() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    one, two, four = [operations(lambda rows=rows: module(torch.ones(rows, 3, 8, 8))) for rows in (1, 2, 4)]
    assert two - one > 2 * 3 * 9 * 4 * 36
    assert four - two == 2 * (two - one)


BASE: dict[str, Any] = {
    "operations": 1e9,
    "gradient_bytes": 10**6,
    "output_bytes": 10**4,
    "sums": 0,
    "parts": 2,
    "has_gradients": True,
    "is_cpu": True,
}


def test_a_call_of_a_gigaflop_is_worth_dividing() -> None:
    assert is_worth_dividing(**BASE)


@pytest.mark.parametrize(
    "changes",
    [
        {"operations": 1e6},
        {"gradient_bytes": 10**9},
        {"output_bytes": 10**9},
        {"sums": 30},
        {"parts": 1},
        {"is_cpu": False},
    ],
)
def test_small_calls_and_large_messages_are_not(changes: dict[str, Any]) -> None:
    assert not is_worth_dividing(**BASE | changes)


def test_gradients_that_are_not_computed_cost_nothing() -> None:
    values = BASE | {"gradient_bytes": 10**9}
    assert not is_worth_dividing(**values)
    assert is_worth_dividing(**values | {"has_gradients": False})


def test_a_backward_has_as_many_sums_as_the_forward() -> None:
    most = next(n for n in range(1, 40) if not is_worth_dividing(**BASE | {"sums": n}))
    # 3e9 operations of forward and backward and 10**6 bytes, or a third of the operations and no gradients.
    forward = next(n for n in range(1, 40) if not is_worth_dividing(**BASE | {"sums": n, "has_gradients": False}))
    assert (most, forward) == (21, 14)


# Operations of the forward of a batch, bytes of gradients and outputs, and layers with batch norm, as counted in
# benchmarks/plain_loop_cases.py.
@pytest.mark.parametrize(
    ("operations", "gradient_bytes", "output_bytes", "sums", "is_divided"),
    [
        pytest.param(1.4e6, 40_000, 2_560, 0, False, id="two linear layers, batch 64"),
        pytest.param(2.3e8, 690_000, 2_560, 7, False, id="digits, batch 64"),
        pytest.param(4.8e9, 44_730_000, 640, 20, True, id="ResNet-18, 64 px, batch 16"),
        pytest.param(4.8e9, 1_930_000, 524_000, 14, True, id="U-Net, 64 px, batch 16"),
        pytest.param(5.1e9, 19_550_000, 524_000, 0, True, id="GPT, 5 million parameters, batch 8"),
    ],
)
def test_decisions_of_the_cases_of_the_benchmark(
    operations: float, gradient_bytes: int, output_bytes: int, sums: int, is_divided: bool
) -> None:
    values = {"operations": operations, "gradient_bytes": gradient_bytes, "output_bytes": output_bytes, "sums": sums}
    assert is_worth_dividing(**BASE | values) == is_divided
