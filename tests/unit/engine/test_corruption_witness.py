"""The witness names the rank of each flipped bit, reports nothing in correct steps, and changes no result."""

from typing import Any

import pytest
import torch

from samestep import launch
from samestep.engine.corruption_witness import wrong_ranks
from samestep.engine.nested_data import pack, unpack
from workers import witness as ranks_witness

ByRank = dict[str, list[Any]]
SETTINGS = ("dropout and batch norm", "bf16")


@pytest.mark.parametrize(
    ("size", "results", "wrong"),
    [
        (4, (1, 0, 0), {1}),
        (4, (0, 1, 0), {2}),
        (4, (1, 0, 2), {1, 2}),
        (2, (1, 0, 0), {1}),
        (2, (0, 1, 0), {0, 1}),
        (1, (0, 1, 0), {0}),
    ],
)
def test_a_third_result_decides_which_rank_is_wrong(size: int, results: tuple[int, ...], wrong: set[int]) -> None:
    owner = 1 if size > 1 else 0
    rows = [[0, 0, 0] for _ in range(size)]
    for number, result in enumerate(results):
        rows[(owner + number) % size][number] = result
    assert wrong_ranks(owner, rows) == wrong


def test_data_of_a_microbatch_keep_bits_types_and_memory_layout() -> None:
    images = torch.randn(2, 3, 4, 5)
    tensors = {
        "channels last": images.contiguous(memory_format=torch.channels_last),
        "rows": images[1:],
        "gaps": images[..., ::2],
        "repeated": torch.randn(2, 1).expand(2, 7),
        "windows": torch.arange(10.0).unfold(0, 4, 2),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex128).conj(),
        "half": torch.tensor([[float("nan")], [-0.0]], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "learned": torch.randn(2).requires_grad_(),
    }
    data = (tensors, ["a", None, 2, 0.1, {3: (True, images)}])
    received = unpack(pack(data, torch.device("cpu")))
    assert received[1][:4] == ["a", None, 2, 0.1]
    assert received[1][4][3][0] is True
    assert isinstance(received, tuple)
    assert list(received[0]) == list(tensors)
    for name, tensor in tensors.items():
        copy = received[0][name]
        layout = (copy.dtype, copy.shape, copy.stride(), copy.requires_grad)
        assert layout == (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad), name
        assert torch.equal(torch.nan_to_num(copy), torch.nan_to_num(tensor)), name
        assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


def report(by_rank: list[Any]) -> tuple[list[str], tuple[int, ...]]:
    """Return the lines of the error and its ranks, which are equal on all ranks."""
    assert all(result == by_rank[0] for result in by_rank)
    text, ranks = by_rank[0]
    return text.splitlines(), ranks


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_report_names_rank_step_microbatch_and_parameter(processes: int) -> None:
    results: ByRank = launch(ranks_witness.run_errors, processes=processes)
    last = processes - 1
    lines, ranks = report(results["owner"])
    assert ranks == (last,)
    begin = f"step 2: rank {last} computed wrong values; last witnessed without a difference in step 1 [E_WITNESS]"
    assert lines[0] == begin
    assert lines[1].strip().startswith(f"rank {last}: host ")
    assert lines[1].endswith(", device cpu")
    microbatch = {1: 2, 2: 6, 4: 6}[processes]  # the third of a rank with three or more, otherwise the first
    assert lines[2].strip() == f"microbatch {microbatch} of rank {last} differs in: gradient of 0.weight"
    assert report(results["witness"])[1] == {1: (0,), 2: (0, 1), 4: (3,)}[processes]
    assert set(results["frozen"]) == {begin.replace(f"rank {last}", "rank 0")}
    lines, ranks = report(results["buffer"])
    assert ranks == {1: (), 2: (0, 1), 4: (0,)}[processes]  # a fault that recurs equally, which one rank cannot see
    assert processes == 1 or lines[-3].endswith("buffer 1.running_mean")
    lines, ranks = report(results["permanent"])
    assert ranks == {1: (), 2: (0, 1), 4: (3,)}[processes]
    assert processes != 2 or lines[0].startswith("step 2: one of ranks 0 and 1 computed wrong values")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_options_without_a_possible_witness_are_refused_by_name(strategy: str) -> None:
    errors: ByRank = launch(ranks_witness.run_refusals, strategy, processes=2)
    expected = {
        "ddp": "",
        "fsdp": "witness_every with the mesh fsdp [E_INCOMPATIBLE]",
        "sync": "witness_every with step.batch_norm: sync [E_INCOMPATIBLE]",
        "global": "witness_every with step.gather: global [E_INCOMPATIBLE]",
        "zero": "witness_every is 0 [E_VALUE]",
        "different": "making a witness: ranks have a different witness_every [E_RANK_SETTINGS]",
        "data": "data[2]['inputs'][1] is a set, which cannot be sent to another rank [E_INCOMPATIBLE]",
    }
    assert {name: set(by_rank) for name, by_rank in errors.items()} == {name: {expected[name]} for name in errors}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 3)), 4])
def test_correct_steps_have_the_same_bits_with_a_witness(processes: int) -> None:
    names = tuple(name for name in ranks_witness.SETTINGS if name != "compiled")
    plain, witnessed = (launch(ranks_witness.run_training, names, 6, every, processes=processes) for every in (None, 1))
    assert witnessed == plain


@pytest.mark.long
def test_compiled_steps_have_the_same_bits_with_a_witness() -> None:
    plain, witnessed = (launch(ranks_witness.run_training, ("compiled",), 4, every, processes=3) for every in (None, 1))
    assert witnessed == plain


@pytest.mark.slow
def test_each_of_50_flipped_bits_is_reported_with_its_rank() -> None:
    wrong: ByRank = launch(ranks_witness.run_flips, SETTINGS, 13, processes=4)
    assert not any(chain_of(wrong)), wrong


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_each_of_1000_flipped_bits_is_reported_with_its_rank(processes: int) -> None:
    wrong: ByRank = launch(ranks_witness.run_flips, SETTINGS, 167, processes=processes)
    assert not any(chain_of(wrong)), wrong


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_1000_correct_steps_raise_no_false_alarm(processes: int) -> None:
    launch(ranks_witness.run_training, SETTINGS, 167, 1, processes=processes)


def chain_of(by_name: ByRank) -> list[Any]:
    """Return the wrong reports of all ranks."""
    return [wrong for by_rank in by_name.values() for wrong in by_rank]
