"""`pp`, `ddp x pp` and `pp x tp`: every schedule computes what one process does."""

from pathlib import Path
from typing import Any

import pytest

import ranks_pipeline
from ranks_pipeline import LAYOUTS, pipeline
from samestep import launch
from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import EXIT_INPUT
from samestep.runtime.crew import RankError
from ten_steps import HALF, MOST, by_ranks, require_same

Outcomes = dict[str, dict[str, dict[str, Any]]]
# Products are divided in the text model alone, for which there is a plan.
QUICK = {"deep": ["1f1b", "zero_bubble", "ddp x pp"], "text": ["1f1b", "zero_bubble", "ddp x pp", "pp x tp"]}
DEEP = [name for name in LAYOUTS if "tp" not in name.split() and name not in ("single", *QUICK["deep"])]
REST = {"deep": DEEP, "text": [*DEEP, "pp x tp zero_bubble"]}
SAVED = {task: ["single", "1f1b", names[-1]] for task, names in QUICK.items()}


def trained(names: list[str], task: str, folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for ranks, some in by_ranks(names, LAYOUTS).items():
        found |= launch(ranks_pipeline.all_trained, some, task, folder, processes=ranks)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    return {task: trained(["single", *names], task, folder / task) for task, names in QUICK.items()}


@pytest.fixture(scope="module")
def more(folder: Path) -> Outcomes:
    return {task: trained(names, task, folder / task) for task, names in REST.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), [(task, name) for task, names in QUICK.items() for name in names])
def test_it_computes_what_one_process_does(outcomes: Outcomes, name: str, task: str) -> None:
    found = outcomes[task][name]
    require_same(found, outcomes[task]["single"])
    assert found["metrics"] == pytest.approx(outcomes[task]["single"]["metrics"], rel=MOST)
    assert all(said == found["of ranks"][0] for said in found["of ranks"])


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), [(task, name) for task, names in REST.items() for name in names])
def test_every_schedule_does(outcomes: Outcomes, more: Outcomes, name: str, task: str) -> None:
    require_same(more[task][name], outcomes[task]["single"])


@pytest.mark.slow
def test_a_rank_holds_its_stages_alone(outcomes: Outcomes) -> None:
    (whole,) = outcomes["deep"]["single"]["held"]
    held = outcomes["deep"]["1f1b"]["held"]
    shared = 16 * 16 + 16  # of the block that is used first and last
    assert sum(held) == whole + shared
    assert max(held) < 0.65 * whole
    assert outcomes["deep"]["ddp x pp"]["layout"] == "ddp x pp"
    assert outcomes["text"]["pp x tp"]["layout"] == "pp x tp"
    assert max(outcomes["text"]["pp x tp"]["held"]) < 0.6 * max(outcomes["text"]["1f1b"]["held"])


@pytest.mark.slow
def test_the_checkpoint_is_that_of_one_process(outcomes: Outcomes, folder: Path) -> None:
    from safetensors.torch import load_file

    for task in outcomes:
        for name in SAVED[task][1:]:
            expected, found = (CheckpointFolder(folder / task / each).newest_whole() for each in ("single", name))
            assert expected is not None and found is not None
            for file in ("model.safetensors", "optimizer.safetensors", "average.safetensors"):
                mine, theirs = load_file(found / file), load_file(expected / file)
                assert {key: tensor.shape for key, tensor in mine.items()} == {k: t.shape for k, t in theirs.items()}


@pytest.mark.slow
def test_one_process_goes_on_from_stages_and_they_from_it(outcomes: Outcomes, folder: Path) -> None:
    found = launch(ranks_pipeline.all_gone_on, ["single"], "text", folder / "text", ["1f1b"], processes=1)
    found |= launch(ranks_pipeline.all_gone_on, ["1f1b"], "text", folder / "text", ["single"], processes=2)
    for outcome in found.values():
        require_same(outcome, outcomes["text"]["single"], HALF)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["deep", pytest.param("text", marks=pytest.mark.long)])
def test_what_one_layout_has_saved_any_other_goes_on_from(outcomes: Outcomes, folder: Path, task: str) -> None:
    found = {}
    for ranks, names in by_ranks(["single", *QUICK[task]], LAYOUTS).items():
        found |= launch(ranks_pipeline.all_gone_on, names, task, folder / task, SAVED[task], processes=ranks)
    assert len(found) == (1 + len(QUICK[task])) * len(SAVED[task])
    for outcome in found.values():
        require_same(outcome, outcomes[task]["single"], HALF)


def test_dropout_is_a_matter_of_stages_not_of_copies_or_runs() -> None:
    part = pipeline(2, "gpipe")
    two = launch(ranks_pipeline.losses_under, {"a": (part, "dropout", {}), "b": (part, "dropout", {})}, processes=2)
    assert two["a"] == two["b"]
    (four,) = launch(
        ranks_pipeline.losses_under, {"copies": (pipeline(2, copies=2), "dropout", {})}, processes=4
    ).values()
    assert [pytest.approx(step, rel=MOST) for step in two["a"]] == four
    (one,) = launch(ranks_pipeline.losses_under, {"one": (None, "dropout", {})}, processes=1).values()
    assert one[0] != pytest.approx(four[0], rel=1e-6)


@pytest.mark.slow
def test_switches_work_in_stages_and_stages_that_learn_nothing() -> None:
    rules: dict[str, tuple[str, dict[str, Any]]] = {
        "recompute": ("text", {"recompute": ("blocks.*",)}),
        "channels last": ("deep", {"channels_last": True}),
        "no clipping": ("deep", {"clip_norm": None}),
        "first frozen": ("first frozen", {}),
        "last frozen": ("last frozen", {}),
    }
    single = {name: (None, *case) for name, case in rules.items()}
    divided = {
        f"{name} {schedule}": (pipeline(2, schedule), *case)
        for name, case in rules.items()
        for schedule in ("1f1b", "zero_bubble")
    }
    expected = launch(ranks_pipeline.losses_under, single, processes=1)
    for name, found in launch(ranks_pipeline.losses_under, divided, processes=2).items():
        theirs = expected[name.rpartition(" ")[0]]
        assert found == [pytest.approx(step, rel=MOST) for step in theirs], name


@pytest.mark.long
def test_modules_of_stages_can_be_compiled() -> None:
    rules = {"compile": True}
    (expected,) = launch(ranks_pipeline.losses_under, {"one": (None, "deep", rules)}, processes=1).values()
    (found,) = launch(ranks_pipeline.losses_under, {"two": (pipeline(2), "deep", rules)}, processes=2).values()
    assert found == [pytest.approx(step, rel=MOST) for step in expected]


def test_observers_hear_of_every_shard_where_the_outputs_are() -> None:
    assert launch(ranks_pipeline.told, processes=2) == [[], [0, 1, 2, 3, 4]]


def test_a_step_that_is_not_finite_ends_alike_on_every_rank() -> None:
    stopped = launch(ranks_pipeline.not_finite, "stop", processes=2)
    assert stopped["said"][0].startswith("step 1: the loss of shard 2 is not finite")
    assert stopped["said"][0] == stopped["said"][1]
    assert stopped["steps"] == [0, 0]
    skipped = launch(ranks_pipeline.not_finite, "skip", processes=2)
    assert skipped["said"] == ["", ""]
    assert skipped["steps"] == [5, 5]
    assert skipped["finite"]


@pytest.fixture(scope="module")
def refusals() -> dict[str, list[str]]:
    return launch(ranks_pipeline.refused, processes=2)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "said", "do"),
    [
        ("control flow", "the forward of Chooses cannot be cut into stages", "torch.fx.wrap"),
        ("optional input", "the data give the argument 'scale', which has a default", "without a default"),
        ("too few modules", "Shapes has 3 modules at which a stage can begin, for 4 stages", "pipeline=3"),
        ("unknown stage", "the forward never calls a module 'block.3'", "names like blocks.3"),
        ("number of stages", "names 2 modules, which makes 3 stages for 2 ranks", "name 1 of them"),
        ("compile", "step.compile with strategy.schedule: zero_bubble", "strategy.schedule: 1f1b"),
        ("batch norm", "batch_norm: sync", "batch_norm: shard"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank_alike(
    refusals: dict[str, list[str]], name: str, said: str, do: str
) -> None:
    assert refusals[name][0] == refusals[name][1]
    assert said in refusals[name][0]
    assert do in refusals[name][0]


def test_what_is_no_tensor_does_not_go_from_stage_to_stage() -> None:
    with pytest.raises(RankError, match="a int goes from stage 1 of the pipeline to the next") as failed:
        launch(ranks_pipeline.number_between_stages, processes=2)
    assert failed.value.exit_code == EXIT_INPUT


@pytest.mark.slow
def test_the_stage_that_hangs_is_told_from_those_that_wait_for_it() -> None:
    with pytest.raises(RankError, match="rank 1 does not come") as failed:
        launch(ranks_pipeline.stuck, processes=3, hang_after=4)
    assert "ranks_pipeline.py" in str(failed.value).partition("stack of rank 0")[0]
