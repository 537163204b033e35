"""A tensor axis computes what one process does, and goes on from what any other layout saved."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ranks_tensor
from ranks_tensor import BETWEEN, LAYOUTS
from samestep import launch
from samestep.errors import InputError
from samestep.parallel.drawing import draws
from samestep.parallel.plans import ready_plan
from samestep.parallel.tensor import plan_for
from ten_steps import HALF, MOST, require_same
from tensor_models import MODELS, PLAN, Layers, model_of

Outcomes = dict[tuple[str, str], dict[str, Any]]


def trained(folder: Path, layouts: list[str], models: list[str], **rules: Any) -> Outcomes:
    found: Outcomes = {}
    for ranks in sorted({LAYOUTS[layout][0] for layout in layouts}):
        names = [layout for layout in layouts if LAYOUTS[layout][0] == ranks]
        found |= launch(partial(ranks_tensor.all_trained, names, models, folder, **rules), processes=ranks)
    return found


def require_layout(found: Outcomes, layout: str, model: str) -> None:
    """As one process; what ranks of a tensor axis have alike is the same bits; and each holds a part."""
    mine, single = found[layout, model], found["single", model]
    require_same(mine, single)
    assert len(set(mine["bits"])) == len({place for place, _ in mine["bits"]})
    assert max(mine["held"]) < single["held"][0]


def _mark(model: str) -> pytest.MarkDecorator:
    return pytest.mark.slow if model in ("layers", "gpt", "bert", "timm vit") else pytest.mark.long


def test_ddp_x_tp_computes_what_one_process_does(tmp_path: Path) -> None:
    found = trained(tmp_path, ["single", "ddp x tp"], ["layers"])
    require_layout(found, "ddp x tp", "layers")
    assert found["ddp x tp", "layers"]["layout"] == "ddp x tp"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", [pytest.param(name, marks=_mark(name)) for name in MODELS])
def test_every_family_computes_what_one_process_does(tmp_path: Path, model: str) -> None:
    every = ["single", "tp on 2", "ddp x tp", "fsdp x tp", *(["tp on 4"] if model in ("layers", "gpt") else [])]
    found = trained(tmp_path, every, [model])
    for layout in every[1:]:
        require_layout(found, layout, model)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_checkpoints_go_between_layouts(tmp_path: Path) -> None:
    layouts = ["single", "fsdp x tp", "fsdp", "ddp x tp"]
    found = trained(tmp_path, layouts, ["layers"])
    pairs = list(pairwise([*layouts, "single", "ddp x tp", "fsdp x tp"]))
    for ranks in (1, 3, 4):
        here = [(before, after) for before, after in pairs if LAYOUTS[after][0] == ranks]
        resumed = launch(ranks_tensor.all_gone_on, here, "layers", tmp_path, processes=ranks)
        for outcome in resumed.values():
            require_same(outcome, found["single", "layers"], HALF)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_compiled_model_is_divided_too(tmp_path: Path) -> None:
    found = trained(tmp_path, ["single"], ["layers"]) | trained(tmp_path, ["tp on 2"], ["layers"], compile=True)
    require_layout(found, "tp on 2", "layers")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        pytest.param("layers", "blocks.*", marks=pytest.mark.slow),
        pytest.param("bert", "bert.encoder.layer.*", marks=pytest.mark.long),
    ],
)
def test_blocks_are_computed_again_with_the_same_masks(tmp_path: Path, model: str, blocks: str) -> None:
    found = trained(tmp_path, ["single", "ddp x tp"], [model], recompute=(blocks,))
    plain = trained(tmp_path / "plain", ["single"], [model])
    require_layout(found, "ddp x tp", model)
    assert found["single", model]["steps"] == plain["single", model]["steps"]


# --- one question each ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    found: dict[str, Any] = launch(ranks_tensor.questions, processes=4)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found: dict[str, Any] = launch(ranks_tensor.alone, processes=1)
    return found


@pytest.mark.parametrize("between", BETWEEN)
def test_what_would_be_wrong_on_a_part_is_refused(said: dict[str, Any], between: str) -> None:
    value, rule, do = said["refused"][between]
    assert {
        "a norm": "meets a whole one",
        "a whole tensor": "meets a whole one",
        "functional dropout": "dropout is called with a divided tensor",
        "the end": "returns a divided tensor",
    }[between] in value
    assert rule
    assert "column_gathered" in do


def test_a_mean_over_what_is_divided_is_that_of_the_whole(said: dict[str, Any], alone: dict[str, Any]) -> None:
    assert said["a mean"][0] == pytest.approx(alone["a mean"][0], rel=MOST)


def test_all_ranks_hear_who_wants_to_stop_or_to_save(said: dict[str, Any]) -> None:
    assert said["asked"] == [[False, True, True, False, True, True]] * 4


def test_parts_of_a_loss_are_counted_once(said: dict[str, Any], alone: dict[str, Any]) -> None:
    assert said["parts"] == pytest.approx(alone["parts"], rel=MOST)


def test_what_is_not_finite_is_named_as_by_one_process(said: dict[str, Any], alone: dict[str, Any]) -> None:
    assert said["stopped"] == alone["stopped"] * 4
    assert "gradient" in alone["stopped"][0][1]


def test_an_overflow_is_one_decision(said: dict[str, Any]) -> None:
    first, *others = said["scaled"]
    assert others == [first] * 3
    assert True in first[0]
    assert False in first[0]


def test_joint_batch_norm_is_refused(said: dict[str, Any]) -> None:
    assert "batch_norm: sync with the layout ddp x tp" in said["sync"]
    assert "--strategy ddp" in said["sync"]


def test_an_attention_is_not_computed_again_alone(said: dict[str, Any]) -> None:
    assert "bert.encoder.layer.0.attention.self is computed again in backward" in said["again"]
    assert "a module around" in said["again"]


def test_heads_are_divided_and_their_scores_dropped_from_as_a_whole(said: dict[str, Any]) -> None:
    for found in said["heads"]:
        assert found["seen"][:2] == [2, 2]
        # Of two blocks with two pairs of products each, one in forward and one in backward.
        assert found["messages"] == {"all_reduce": 8}
        assert "scaled_dot_product_attention in bert.encoder.layer.0.attention.self" in found["said"][0]
        assert found["said"][1] == ""


@pytest.mark.parametrize(
    ("function", "arguments", "named", "expected"),
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
def test_what_draws_is_known(function: Any, arguments: tuple[Any, ...], named: dict[str, Any], expected: bool) -> None:
    assert draws(function, arguments, named) is expected


# --- plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [name for name in MODELS if name != "layers"])
def test_ready_plans_divide_most_of_each_block(model: str) -> None:
    found = model_of(model)
    plan = plan_for(found, {}, 2)
    parts = sum(p.numel() for name in plan for p in found.get_submodule(name).parameters())
    blocks = [m for m in found.modules() if type(m).__name__ in ("_Block", "GPT2Block", "BertLayer", "RobertaLayer")]
    blocks += [m for m in found.modules() if type(m).__name__ in ("Block", "EncoderBlock")]
    assert len(blocks) == 2
    whole = sum(p.numel() for block in blocks for p in block.parameters())
    assert parts / whole > (0.4 if model == "torchvision vit" else 0.95)
    assert plan == ready_plan(found)


def test_plans_of_blocks_are_found_inside_of_another_model() -> None:
    plan = ready_plan(nn.ModuleDict({"body": model_of("gpt")}))
    assert plan["body.blocks.1.narrowed"] == "row"
    assert set(ready_plan(model_of("gpt").blocks[0])) == {"mixed", "joined", "widened", "narrowed"}


def test_the_last_pattern_that_matches_counts() -> None:
    plan = plan_for(Layers(), {"*": "column_gathered", "blocks.0.*": "row"}, 2)
    assert plan["blocks.0.up"] == "row"
    assert plan["blocks.1.up"] == plan["embed"] == "column_gathered"
    assert "norm" not in plan


def refusal(model: nn.Module, plan: dict[str, str], ranks: int = 2) -> InputError:
    with pytest.raises(InputError) as refused:
        plan_for(model, plan, ranks)
    return refused.value


def test_a_model_without_a_plan_is_told_how_to_write_one() -> None:
    error = refusal(Layers(), {})
    assert "a tensor axis of 2 for a Layers" in error.value
    assert "strategy.plan={" in str(error.do)
    assert '"blocks.0.up": column_gathered' in str(error.do)


def test_a_pattern_that_matches_nothing_is_refused_with_close_names() -> None:
    error = refusal(Layers(), {"blocks.*.upp": "column"})
    assert "'blocks.*.upp' matches no module" in error.value
    assert "blocks.0.up" in str(error.do)


def test_a_module_that_cannot_be_divided_is_refused() -> None:
    assert "matches norm (BatchNorm1d)" in refusal(Layers(), {"norm": "column"}).value
    assert "matches norm (BatchNorm1d)" in refusal(Layers(), {"norm": "heads"}).value
    assert "matches embed (Embedding)" in refusal(Layers(), {"embed": "row"}).value
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert "matches one (ParametrizedLinear)" in refusal(nn.ModuleDict({"one": computed}), {"one": "row"}).value
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    assert "attention.out_proj" in refusal(attention, {"*.out_proj": "row"}).value


def test_a_word_that_is_none_is_refused() -> None:
    error = refusal(Layers(), {"*.up": "colum"})
    assert "'*.up' is 'colum'" in error.value
    assert error.do == "did you mean column?"


@pytest.mark.parametrize(("ranks", "fitting"), [(3, "2, 4, 8, 16"), (5, "2, 4, 8, 16")])
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(ranks: int, fitting: str) -> None:
    error = refusal(Layers(), {name: word for name, word in PLAN.items() if name != "last"}, ranks)
    assert f"which a tensor axis of {ranks} does not divide" in error.value
    assert fitting in str(error.do)


def test_heads_that_do_not_divide_are_refused() -> None:
    error = refusal(model_of("bert"), {}, 8)
    assert "attention.self has 4 heads, which a tensor axis of 8 does not divide" in error.value
    assert "--mesh tensor=4" in str(error.do)


def test_where_no_size_divides_a_module_is_to_be_left_out() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 9), "two": nn.Linear(4, 4)})
    error = refusal(model, {"*": "column_gathered"}, 2)
    assert "one has 9 outputs" in error.value
    assert "leave one out" in str(error.do)


def test_a_weight_that_two_modules_use_is_not_divided() -> None:
    model = Layers()
    model.blocks[0].up.weight = model.blocks[1].up.weight
    error = refusal(model, {"*.up": "column", "*.down": "row"})
    assert "blocks.0.up and blocks.1.up have one weight" in error.value


@pytest.mark.gpu
def test_a_tensor_axis_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    single, tp = (launch(ranks_tensor.losses_on_gpus, layout, processes=LAYOUTS[layout][0]) for layout in _ON_GPUS)
    assert tp == pytest.approx(single, rel=1e-9)


_ON_GPUS = ("single", "tp on 2")
