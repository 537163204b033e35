"""Tensor parallelism: results and checkpoints of one process, plans, errors."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.ten_steps import HALF, TOLERANCE, require_same
from helpers.tensor_models import MODELS, PLAN, Layers, model_of
from samestep import launch
from samestep.errors import InputError
from samestep.strategies.random_functions import is_random
from samestep.strategies.tensor_plan import builtin_plan, resolve_plan
from workers import tensor as ranks_tensor
from workers.tensor import BETWEEN, LAYOUTS

Outcomes = dict[tuple[str, str], dict[str, Any]]


def train(folder: Path, layouts: list[str], models: list[str], **options: Any) -> Outcomes:
    results: Outcomes = {}
    for ranks in sorted({LAYOUTS[layout][0] for layout in layouts}):
        names = [layout for layout in layouts if LAYOUTS[layout][0] == ranks]
        results |= launch(partial(ranks_tensor.train_all, names, models, folder, **options), processes=ranks)
    return results


def require_layout(results: Outcomes, layout: str, model: str) -> None:
    """Require the results of one process, equal bits of replicated parameters, and fewer elements on each rank."""
    result, single = results[layout, model], results["single", model]
    require_same(result, single)
    assert len(set(result["bits"])) == len({coordinate for coordinate, _ in result["bits"]})
    assert max(result["sizes"]) < single["sizes"][0]


def _mark(model: str) -> pytest.MarkDecorator:
    return pytest.mark.slow if model == "layers" else pytest.mark.long


def test_ddp_x_tp_gives_the_results_of_one_process(tmp_path: Path) -> None:
    outcomes = train(tmp_path, ["single", "ddp x tp"], ["layers"])
    require_layout(outcomes, "ddp x tp", "layers")
    assert outcomes["ddp x tp", "layers"]["layout"] == "ddp x tp"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", [pytest.param(name, marks=_mark(name)) for name in MODELS])
def test_every_model_gives_the_results_of_one_process(tmp_path: Path, model: str) -> None:
    layouts = ["single", "tp on 2", "ddp x tp", "fsdp x tp", *(["tp on 4"] if model in ("layers", "gpt") else [])]
    outcomes = train(tmp_path, layouts, [model])
    for layout in layouts[1:]:
        require_layout(outcomes, layout, model)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_checkpoints_move_between_layouts(tmp_path: Path) -> None:
    layouts = ["single", "fsdp x tp", "fsdp", "ddp x tp"]
    outcomes = train(tmp_path, layouts, ["layers"])
    pairs = list(pairwise([*layouts, "single", "ddp x tp", "fsdp x tp"]))
    for ranks in (1, 3, 4):
        cases = [(before, after) for before, after in pairs if LAYOUTS[after][0] == ranks]
        resumed = launch(ranks_tensor.resume_all, cases, "layers", tmp_path, processes=ranks)
        for outcome in resumed.values():
            require_same(outcome, outcomes["single", "layers"], HALF)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        pytest.param("layers", "blocks.*", marks=pytest.mark.slow),
        pytest.param("bert", "bert.encoder.layer.*", marks=pytest.mark.long),
    ],
)
def test_activation_checkpointing_uses_the_same_masks(tmp_path: Path, model: str, blocks: str) -> None:
    outcomes = train(tmp_path, ["single", "ddp x tp"], [model], recompute=(blocks,))
    plain = train(tmp_path / "plain", ["single"], [model])
    require_layout(outcomes, "ddp x tp", model)
    assert outcomes["single", model]["steps"] == plain["single", model]["steps"]


# --- properties and errors ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return launch(ranks_tensor.run_cases, processes=4)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return launch(ranks_tensor.run_cases_in_one_process, processes=1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("between", BETWEEN)
def test_unsupported_operations_are_errors(results: dict[str, Any], between: str) -> None:
    value, expected, fix = results["errors"][between]
    assert {
        "a norm": "layer_norm is called with a divided tensor",
        "a whole tensor": "mixes a divided tensor with a plain one",
        "random numbers": "rand_like is called with a divided tensor",
        "a mean": "mean is called with a divided tensor",
        "the end": "returns a divided tensor",
    }[between] in value
    assert expected
    assert "column_gathered" in fix


def test_all_ranks_begin_with_the_weights_of_rank_0(results: dict[str, Any], single: dict[str, Any]) -> None:
    assert results["weights of rank 0"] == pytest.approx(single["weights of rank 0"], rel=TOLERANCE)


def test_all_ranks_receive_stop_and_save_requests(results: dict[str, Any]) -> None:
    assert results["requests"] == [[False, True, True, False, True, True]] * 4


def test_terms_of_a_loss_are_counted_once(results: dict[str, Any], single: dict[str, Any]) -> None:
    assert results["terms"] == pytest.approx(single["terms"], rel=TOLERANCE)


def test_non_finite_errors_are_those_of_one_process(results: dict[str, Any], single: dict[str, Any]) -> None:
    assert results["non-finite"] == single["non-finite"] * 4
    assert "gradient" in single["non-finite"][0][1]


def test_all_ranks_skip_the_same_steps(results: dict[str, Any]) -> None:
    first, *others = results["skipped"]
    assert others == [first] * 3
    assert True in first[0]
    assert False in first[0]


def test_sync_batch_norm_is_an_error(results: dict[str, Any]) -> None:
    assert "batch_norm: sync with the mesh ddp x tp" in results["sync"]
    assert "--strategy ddp" in results["sync"]


def test_slices_that_the_ranks_do_not_share_equally_are_an_error(results: dict[str, Any]) -> None:
    assert results["odd"] == ("E_TENSOR_PLAN", "step.tensor_slices is 3, with a tensor axis of 2")


def test_activation_checkpointing_of_divided_heads_is_an_error(results: dict[str, Any]) -> None:
    assert "activation checkpointing of bert.encoder.layer.0.attention.self" in results["checkpointing"]
    assert "a module around" in results["checkpointing"]


def test_heads_are_divided_and_dropout_uses_full_masks(results: dict[str, Any]) -> None:
    for result in results["heads"]:
        assert result["heads"][:2] == [2, 2]
        # Two blocks with two pairs of layers, one message in forward and one in backward.
        assert result["messages"] == 8
        assert "scaled_dot_product_attention in bert.encoder.layer.0.attention.self" in result["errors"][0]
        assert result["errors"][1] == ""


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (functional.dropout, (0, 0.5), {}, True),
        (functional.dropout, (0, 0.5, False), {}, False),
        (functional.dropout, (), {"input": 0, "p": 0.0}, False),
        (torch.dropout, (0,), {"p": 0.5, "train": False}, False),
        (functional.scaled_dot_product_attention, (0, 0, 0, None), {}, False),
        (functional.scaled_dot_product_attention, (0, 0, 0, None, 0.1), {}, True),
        (functional.scaled_dot_product_attention, (0, 0, 0), {"dropout_p": 0.1}, True),
        (torch.Tensor.exponential_, (0,), {}, True),
        (functional.gelu, (0,), {}, False),
    ],
)
def test_random_calls_are_recognized(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool
) -> None:
    assert is_random(function, args, kwargs) is expected


# --- plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if name != "layers"])
def test_builtin_plans_divide_most_of_each_block(name: str) -> None:
    model = model_of(name)
    plan = resolve_plan(model, {}, 2)
    divided = sum(p.numel() for module in plan for p in model.get_submodule(module).parameters())
    blocks = [m for m in model.modules() if type(m).__name__ in ("_Block", "GPT2Block", "BertLayer", "RobertaLayer")]
    blocks += [m for m in model.modules() if type(m).__name__ in ("Block", "EncoderBlock")]
    assert len(blocks) == 2
    total = sum(p.numel() for block in blocks for p in block.parameters())
    assert divided / total > (0.4 if name == "torchvision vit" else 0.95)
    assert plan == builtin_plan(model)


def test_the_last_matching_pattern_wins() -> None:
    plan = resolve_plan(Layers(), {"*": "column_gathered", "blocks.0.*": "row"}, 2)
    assert plan["blocks.0.up"] == "row"
    assert plan["blocks.1.up"] == plan["embed"] == "column_gathered"
    assert "norm" not in plan


def plan_error(model: nn.Module, plan: dict[str, str], ranks: int = 2) -> InputError:
    with pytest.raises(InputError) as error:
        resolve_plan(model, plan, ranks)
    return error.value


def test_a_pattern_without_match_is_an_error_with_close_names() -> None:
    error = plan_error(Layers(), {"blocks.*.upp": "column"})
    assert "'blocks.*.upp' matches no module" in error.value
    assert "blocks.0.up" in str(error.fix)


def test_a_module_that_cannot_be_divided_is_an_error() -> None:
    assert "matches no module that can be" in plan_error(Layers(), {"norm": "column"}).value
    assert "matches no module that can be" in plan_error(Layers(), {"norm": "heads"}).value
    assert "matches no module that can be" in plan_error(Layers(), {"embed": "row"}).value
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert "matches no module that can be" in plan_error(nn.ModuleDict({"one": computed}), {"one": "row"}).value
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    assert "'*.out_proj' matches no module" in plan_error(attention, {"*.out_proj": "row"}).value


def test_an_unknown_kind_is_an_error() -> None:
    error = plan_error(Layers(), {"*.up": "colum"})
    assert "'*.up' is 'colum'" in error.value
    assert error.fix == "use one of these kinds"


@pytest.mark.parametrize(("ranks", "fitting"), [(3, "2, 4, 8, 16"), (5, "2, 4, 8, 16")])
def test_sizes_that_are_not_divisible_are_errors_with_possible_axes(ranks: int, fitting: str) -> None:
    error = plan_error(Layers(), {name: kind for name, kind in PLAN.items() if name != "last"}, ranks)
    assert f"not divisible into {ranks} slices" in error.value
    assert fitting in str(error.fix)


def test_a_number_of_heads_that_is_not_divisible_is_an_error() -> None:
    error = plan_error(model_of("bert"), {}, 8)
    assert "attention.self has 4 heads, not divisible into 8 slices" in error.value
    assert "step.tensor_slices=4" in str(error.fix)


def test_shared_weights_cannot_be_divided() -> None:
    model = Layers()
    model.blocks[0].up.weight = model.blocks[1].up.weight
    error = plan_error(model, {"*.up": "column", "*.down": "row"})
    assert "blocks.0.up and blocks.1.up share a weight" in error.value


@pytest.mark.gpu
def test_a_tensor_axis_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    single, tp = (launch(ranks_tensor.losses_on_gpus, layout, processes=LAYOUTS[layout][0]) for layout in _ON_GPUS)
    assert tp == pytest.approx(single, rel=1e-9)


_ON_GPUS = ("single", "tp on 2")
