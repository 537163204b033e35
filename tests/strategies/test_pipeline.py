"""`pp`, `ddp x pp` and `pp x tp`: every schedule gives the result of one process."""

from pathlib import Path
from typing import Any

import pytest

from helpers.ten_steps import HALF, TOLERANCE, by_ranks, require_equal, require_same
from samestep import launch
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import StrategyConfig
from samestep.errors import EXIT_INPUT
from samestep.launcher.failure import RankError
from workers import pipeline as ranks_pipeline
from workers.pipeline import LAYOUTS, pipeline

Outcomes = dict[str, dict[str, dict[str, Any]]]
# Only the text model has a plan for a tensor axis.
QUICK = {"deep": ["1f1b", "zero_bubble", "ddp x pp"], "text": ["1f1b", "zero_bubble", "ddp x pp", "pp x tp"]}
SAVED = {task: ["single", "1f1b", names[-1]] for task, names in QUICK.items()}


def require(name: str, result: dict[str, Any], expected: dict[str, Any], first_step: int = 0) -> None:
    """Require the bits of one process; with divided products, equality to rounding."""
    (require_same if "tp" in name.split() else require_equal)(result, expected, first_step)


def train(names: list[str], task: str, folder: Path) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for ranks, group in by_ranks(names, LAYOUTS).items():
        results |= launch(ranks_pipeline.train_all, group, task, folder, processes=ranks)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    return {task: train(["single", *names], task, folder / task) for task, names in QUICK.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), [(task, name) for task, names in QUICK.items() for name in names])
def test_results_are_those_of_one_process(outcomes: Outcomes, name: str, task: str) -> None:
    result = outcomes[task][name]
    require(name, result, outcomes[task]["single"])
    assert result["metrics"] == pytest.approx(outcomes[task]["single"]["metrics"], rel=TOLERANCE)
    assert all(values == result["of ranks"][0] for values in result["of ranks"])


@pytest.mark.slow
def test_a_rank_stores_only_its_stages(outcomes: Outcomes) -> None:
    (total,) = outcomes["deep"]["single"]["sizes"]
    sizes = outcomes["deep"]["1f1b"]["sizes"]
    shared = 16 * 16 + 16  # the block that is used first and last
    assert sum(sizes) == total + shared
    assert max(sizes) < 0.65 * total
    assert outcomes["deep"]["ddp x pp"]["layout"] == "ddp x pp"
    assert outcomes["text"]["pp x tp"]["layout"] == "pp x tp"
    assert max(outcomes["text"]["pp x tp"]["sizes"]) < 0.6 * max(outcomes["text"]["1f1b"]["sizes"])


@pytest.mark.slow
def test_checkpoint_files_are_those_of_one_process(outcomes: Outcomes, folder: Path) -> None:
    from safetensors.torch import load_file

    for task in outcomes:
        for name in SAVED[task][1:]:
            expected, path = (CheckpointFolder(folder / task / run).newest_valid() for run in ("single", name))
            assert expected is not None and path is not None
            for file in ("model.safetensors", "optimizer.safetensors", "average.safetensors"):
                tensors, reference = load_file(path / file), load_file(expected / file)
                assert {k: t.shape for k, t in tensors.items()} == {k: t.shape for k, t in reference.items()}


@pytest.mark.slow
def test_checkpoints_move_between_one_process_and_stages(outcomes: Outcomes, folder: Path) -> None:
    results = launch(ranks_pipeline.resume_all, ["single"], "text", folder / "text", ["1f1b"], processes=1)
    results |= launch(ranks_pipeline.resume_all, ["1f1b"], "text", folder / "text", ["single"], processes=2)
    for outcome in results.values():
        require_equal(outcome, outcomes["text"]["single"], HALF)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("task", ["deep", pytest.param("text", marks=pytest.mark.long)])
def test_every_mesh_resumes_the_checkpoints_of_others(outcomes: Outcomes, folder: Path, task: str) -> None:
    results = {}
    for ranks, names in by_ranks(["single", *QUICK[task]], LAYOUTS).items():
        results |= launch(ranks_pipeline.resume_all, names, task, folder / task, SAVED[task], processes=ranks)
    assert len(results) == (1 + len(QUICK[task])) * len(SAVED[task])
    for names, outcome in results.items():
        require(" ".join(names), outcome, outcomes[task]["single"], HALF)


# First modules of stages. Modules of the second task must not be traced: an attribute changes the code that runs.
PARTS = {"layouts": ("second", "third", "last"), "draws": ("1", "2", "3")}


def strategy_of(task: str, schedule: str, ranks: int, replicas: int) -> StrategyConfig:
    return pipeline(ranks, schedule, replicas, PARTS[task][: ranks - 1] if task in PARTS else ())


def is_possible(case: tuple[str, str, int, int, str]) -> bool:
    """Return whether the stages that a task names fit the schedule."""
    return case[0] not in PARTS or case[1] != "interleaved"


def require_bits_of_one_process(folder: Path, cases: list[tuple[str, str, int, int, str]]) -> None:
    """Compare cases of task, schedule, stages, replicas and precision; all have the same number of ranks."""
    single = {f"{task} {precision}": (None, task, precision, {}) for task, *_, precision in cases}
    expected = launch(ranks_pipeline.digests, folder, single, processes=1)
    divided = {" ".join(map(str, case)): (strategy_of(*case[:4]), case[0], case[4], {}) for case in cases}
    result = launch(ranks_pipeline.digests, folder, divided, processes=cases[0][2] * cases[0][3])
    assert result == {" ".join(map(str, case)): expected[f"{case[0]} {case[4]}"] for case in cases}


def test_random_states_pass_from_stage_to_stage(tmp_path: Path) -> None:
    require_bits_of_one_process(tmp_path, [("dropout", "1f1b", 2, 1, "fp32"), ("draws", "zero_bubble", 2, 1, "fp32")])


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
BITS = [
    pytest.param(
        [("layouts", "1f1b", 4, 1, "fp32"), ("language", "zero_bubble", 4, 1, "bf16")], marks=pytest.mark.slow
    ),
    pytest.param(
        [("language", "interleaved", 2, 2, "fp32"), ("layouts", "1f1b", 2, 2, "bf16")], marks=pytest.mark.slow
    ),
    *(
        pytest.param(
            [c for task in tasks for s in SCHEDULES if is_possible(c := (task, s, *mesh, "fp32"))],
            marks=pytest.mark.long,
        )
        for mesh in ((2, 1), (3, 1), (4, 1), (2, 2))
        for tasks in (("dropout", "language"), ("draws", "shared function", "layouts"))
    ),
    *(
        pytest.param([(task, "1f1b", *mesh, precision) for precision in ("bf16", "fp16")], marks=pytest.mark.long)
        for mesh in ((2, 1), (2, 2))
        for task in ("language", "layouts")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", BITS, ids=lambda cases: " ".join(map(str, cases[0])))
def test_runs_have_the_bits_of_one_process(tmp_path: Path, cases: list[tuple[str, str, int, int, str]]) -> None:
    require_bits_of_one_process(tmp_path, cases)


@pytest.mark.slow
def test_runs_have_the_same_bits_if_the_layout_changes(tmp_path: Path) -> None:
    def train(processes: int, strategy: StrategyConfig | None, name: str, epochs: int, begin: str = "") -> str:
        cases = {name: (strategy, "language", "fp32", {})}
        digests: dict[str, str] = launch(ranks_pipeline.digests, tmp_path, cases, epochs, begin, processes=processes)
        return digests[name]

    train(3, pipeline(3), "first", 1)
    train(2, None, "second", 2, "first")  # ddp
    assert train(4, pipeline(2, "interleaved", 2), "third", 3, "second") == train(1, None, "undisturbed", 3)


@pytest.mark.slow
def test_options_and_frozen_stages() -> None:
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "recompute": ("text", {"recompute": ("blocks.*",)}),
        "channels last": ("deep", {"channels_last": True}),
        "no clipping": ("deep", {"clip_norm": None}),
        "first frozen": ("first frozen", {}),
        "last frozen": ("last frozen", {}),
    }
    single = {name: (None, *case) for name, case in cases.items()}
    divided = {
        f"{name} {schedule}": (pipeline(2, schedule), *case)
        for name, case in cases.items()
        for schedule in ("1f1b", "zero_bubble")
    }
    expected = launch(ranks_pipeline.losses_under, single, processes=1)
    for name, result in launch(ranks_pipeline.losses_under, divided, processes=2).items():
        assert result == expected[name.rpartition(" ")[0]], name


@pytest.mark.long
def test_stages_can_be_compiled() -> None:
    options = {"compile": True, "reduction": "fast"}
    (expected,) = launch(ranks_pipeline.losses_under, {"one": (None, "deep", options)}, processes=1).values()
    (result,) = launch(ranks_pipeline.losses_under, {"two": (pipeline(2), "deep", options)}, processes=2).values()
    assert result == [pytest.approx(step, rel=TOLERANCE) for step in expected]


def test_callbacks_run_on_the_rank_of_the_last_stage() -> None:
    assert launch(ranks_pipeline.callback_microbatches, processes=2) == [[], [0, 1, 2, 3, 4]]


def test_a_non_finite_step_ends_the_same_way_on_every_rank() -> None:
    stopped = launch(ranks_pipeline.not_finite, "stop", processes=2)
    assert stopped["errors"][0].startswith("step 1: the loss of microbatch 2 is not finite")
    assert stopped["errors"][0] == stopped["errors"][1]
    assert stopped["steps"] == [0, 0]
    skipped = launch(ranks_pipeline.not_finite, "skip", processes=2)
    assert skipped["errors"] == ["", ""]
    assert skipped["steps"] == [5, 5]
    assert skipped["finite"]


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    return launch(ranks_pipeline.errors, processes=2)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("control flow", "the forward of DataDependent cannot be partitioned", "torch.fx.wrap"),
        ("optional input", "the data contain the argument 'scale', which has a default", "a required parameter"),
        ("too few modules", "SendsShape has 3 modules at which a stage can begin, for 4 stages", "pipeline=3"),
        ("unknown stage", "the forward never calls a module 'block.3'", "names such as blocks.3"),
        ("number of stages", "names 2 modules: 3 stages for 2 ranks", "name 1 modules"),
        ("compile", "step.compile with strategy.schedule: zero_bubble", "strategy.schedule: 1f1b"),
        ("exact compile", "step.compile with the mesh pp and step.reduction: exact", "step.reduction: fast"),
        ("cast twice", "blocks.0.weight is a factor of products in the stages 1, 2", "step.precision: fp32"),
        ("traced draw", "draws random numbers between the calls of its modules", "move the draw into a module"),
        ("batch norm", "batch_norm: sync", "batch_norm: microbatch"),
    ],
)
def test_errors_are_equal_on_every_rank(errors: dict[str, list[str]], name: str, value: str, fix: str) -> None:
    assert errors[name][0] == errors[name][1]
    assert value in errors[name][0]
    assert fix in errors[name][0]


def test_stages_send_only_tensors() -> None:
    with pytest.raises(RankError, match="stage 1 of the pipeline sends a int to the next stage") as error:
        launch(ranks_pipeline.number_between_stages, processes=2)
    assert error.value.exit_code == EXIT_INPUT


@pytest.mark.slow
def test_a_hang_names_the_rank_of_the_hanging_stage() -> None:
    with pytest.raises(RankError, match="rank 1 hangs") as error:
        launch(ranks_pipeline.hang, processes=3, hang_after=15)
    assert "workers/pipeline.py" in str(error.value).partition("stack of rank 0")[0]
