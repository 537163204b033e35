"""Tests of the memory check, of step options, and of the result of a tuning with its output."""

from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from samestep.config import Recipe, RunOptions
from samestep.launcher.failure import Failure, RankError
from samestep.recipes.recipe_files import load_recipe
from samestep.tools.timing import Timing
from samestep.tools.tune import tune as tune_module
from samestep.tools.tune.memory_check import Inspection, check_memory
from samestep.tools.tune.search import search
from samestep.tools.tune.settings import STEP_OPTIONS, Setting, TuneTarget, grid
from samestep.tools.tune.tune import StepOption, TuneConfig, divide, draw, lines, step_options, table, tune

RECIPE = load_recipe("digits", [])
INSPECTION = Inspection(device="cpu", workers=0, peak=2**30, norms=3, dropouts=1, has_images=True)
SPEEDS = {0: 50.0, 1: 100.0, 2: 200.0, 4: 150.0}


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", ["batch_size=60", "microbatches=4"])


def check(recipe: Recipe, enough: int, error: RankError, limit: int | None = None) -> tuple[dict[str, Any], list[int]]:
    """Return the check of ranks that fail with fewer than `enough` microbatches, and the tried numbers."""
    tried = []

    def inspect(variant: Recipe) -> Inspection:
        tried.append(variant.microbatches)
        if variant.microbatches < enough:
            raise error
        return INSPECTION

    return check_memory(recipe, limit, inspect, lambda text: None)[0], tried


def out_of_memory() -> RankError:
    text = "[enforce fail at alloc_cpu.cpp:134] DefaultCPUAllocator: can't allocate memory: you tried to"
    return RankError(Failure.of_exception(1, RuntimeError(text)))


def test_microbatches_that_fit_are_tried_once(recipe: Recipe) -> None:
    memory, tried = check(recipe, 4, out_of_memory())
    assert tried == [4]
    assert (memory["fits"], memory["samples_in_a_microbatch"], memory["peak_bytes"], memory["changes"]) == (
        True,
        15,
        2**30,
        [],
    )


def test_microbatches_are_doubled_until_they_fit(recipe: Recipe) -> None:
    memory, tried = check(recipe, 10, out_of_memory())
    assert tried == [4, 8, 16]
    assert (memory["fits"], memory["microbatches_that_fit"]) == (False, 16)
    assert memory["changes"] == ["batch norm is over 4 instead of 15 samples", "dropout uses other masks"]
    assert "can't allocate memory" in memory["message"]
    assert recipe.microbatches == 4


def test_last_attempt_has_one_sample_per_microbatch(recipe: Recipe) -> None:
    memory, tried = check(recipe, 1000, out_of_memory())
    assert tried == [4, 8, 16, 32, 60]
    assert memory["microbatches_that_fit"] is None


def test_sync_batch_norm_does_not_change(recipe: Recipe) -> None:
    memory, _ = check(replace(recipe, step=replace(recipe.step, batch_norm="sync")), 8, out_of_memory())
    assert memory["changes"] == ["dropout uses other masks"]


def test_rank_killed_by_the_system_was_out_of_memory(recipe: Recipe) -> None:
    memory, _ = check(recipe, 8, RankError(Failure.of_exit(0, -SIGKILL)))
    assert memory["microbatches_that_fit"] == 8


@pytest.mark.parametrize("limit", [None, 10**9])
def test_other_failures_are_raised(recipe: Recipe, limit: int | None) -> None:
    error = RankError(Failure.of_exception(0, ValueError("a mistake")))
    with pytest.raises(RankError, match="a mistake"):
        check(recipe, 8, error, limit)


def test_libraries_that_fail_under_a_limit_were_out_of_memory(recipe: Recipe) -> None:
    exited = RankError(Failure.of_exit(0, 127))
    assert check(recipe, 8, exited, limit=10**9)[0]["microbatches_that_fit"] == 8
    with pytest.raises(RankError):
        check(recipe, 8, exited)
    primitive = RankError(Failure.of_exception(0, RuntimeError("could not create a primitive")))
    assert check(recipe, 8, primitive, limit=10**9)[0]["microbatches_that_fit"] == 8


def trial(module: str, function: str, *arguments: Any, **options: Any) -> Any:
    """Return the result of a trial on a machine that cannot have 8 workers and has no compiler."""
    if function == "inspect_recipe":
        return INSPECTION
    if function == "search_settings":
        _, _, settings, default, _ = arguments
        if Setting(8) in settings:
            failure = replace(Failure.of_exit(0, -SIGKILL), activity=f"trial of {Setting(8)}")
            raise RankError(failure)
        return search(lambda setting: Timing(0.1, 0.5, SPEEDS[setting.workers]), settings, default)
    if function == "rank_speeds":
        return [10.0, 10.1]
    if arguments[1].step.compile:
        raise RankError(Failure.of_exception(0, RuntimeError("no compiler")))
    return [0.92, 1.02, 1.12] if arguments[1].step.channels_last else [1.4, 1.5, 1.6]


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Result of a tuning for two ranks."""
    monkeypatch.setattr(tune_module, "run_trial", trial)
    target = TuneTarget.of("digits", RECIPE, 2, {"processor": "a processor", "cores": 4, "gpus": []})
    config = TuneConfig(
        settings=grid([*SPEEDS, 8], [2, 4]),
        step_options=STEP_OPTIONS,
        memory=None,
        seconds=0.5,
        rounds=3,
        options=RunOptions(),
        preload=(),
    )
    return tune(target, RECIPE, config, {"cores": 4}, lambda text: None)


def test_table_has_a_row_per_setting(tuning: dict[str, Any]) -> None:
    columns = table(tuning).columns
    assert next(iter(columns[0].cells)) == "0"
    verdicts = list(columns[-1].cells)
    assert verdicts[0] == "slower (default)"
    assert sum(verdict.startswith("chosen") for verdict in verdicts) == 1


def test_lines_contain_the_other_results(tuning: dict[str, Any]) -> None:
    texts = dict(lines(tuning, 9))
    assert texts["chosen"] == "2 workers, prefetch 2: 4.00 times as fast as no workers; no result depends on it"
    assert texts["not run"] == f"8 workers, prefetch 2, and more workers: {tuning['not_run'][0]['reason']}"
    assert texts["threads=2"].endswith("--set step.threads=2")
    assert texts["channels_last=true"] == "1.02 ± 0.05 times as fast"
    assert texts["compile=true"] == "cannot run here: rank 0 failed: RuntimeError: no compiler [E_RANK_FAILED]"
    assert texts["memory"] == "a microbatch of 8 samples fits; a rank used 1 GiB"


def test_microbatches_that_do_not_fit_are_reported_with_the_changes() -> None:
    memory = {
        "fits": False,
        "limit_bytes": 2**30,
        "samples_in_a_microbatch": 32,
        "microbatches_that_fit": None,
        "message": "no memory",
    }
    enough = {**memory, "microbatches_that_fit": 8, "changes": ["dropout uses other masks"]}
    [(name, text)] = lines({"memory": enough}, 7)
    assert name == "memory"
    assert "32 samples does not fit in 1 GiB; microbatches: 8 would fit" in text
    assert text.endswith("dropout uses other masks")
    [(_, text)] = lines({"memory": memory}, 7)
    assert text.endswith("no memory")


def test_tuning_is_plain_data(tuning: dict[str, Any]) -> None:
    assert tuning["choice"] == {"workers": 2, "prefetch": 2}
    assert tuning["default"] == {"workers": 0, "prefetch": 2}
    assert [bool(rule["reason"]) for rule in tuning["rules"]] == [False, False, True, True]
    assert sum(len(row["turns"]) for row in tuning["settings"]) == tuning["turns"]
    keys = {
        "place",
        "machine",
        "memory",
        "seconds",
        "rules",
        "choice",
        "default",
        "reason",
        "turns",
        "settings",
        "not_run",
        "shares",
    }
    assert set(tuning) == keys


def test_plot_is_written(tmp_path: Path, tuning: dict[str, Any]) -> None:
    draw(tuning, "digits on 2 ranks", tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


def test_step_options_depend_on_machine_and_recipe() -> None:
    options = list(step_options(RECIPE, INSPECTION, STEP_OPTIONS, cores=8, processes=2))
    assert [str(option) for option in options] == [
        "step.threads=2",
        "step.threads=4",
        "step.channels_last=true",
        "step.compile=true",
        "step.cuda_graphs=auto",
    ]
    assert [bool(option.reason) for option in options] == [False] * 4 + [True]
    assert not reason_of(replace(INSPECTION, device="cuda"), "cuda-graphs", cores=8)
    assert "no core to spare" in reason_of(INSPECTION, "threads", cores=2)
    assert "GPUs" in reason_of(replace(INSPECTION, device="cuda"), "threads", cores=8)
    assert "images" in reason_of(replace(INSPECTION, has_images=False), "channels-last", cores=8)


def reason_of(inspection: Inspection, name: str, cores: int) -> str:
    """Return why an option cannot be measured on two ranks."""
    [option] = step_options(RECIPE, inspection, [name], cores, processes=2)
    return option.reason


def test_step_option_changes_one_key_of_the_recipe() -> None:
    changed = StepOption("step.channels_last", True).apply(RECIPE)
    assert changed == replace(RECIPE, step=replace(RECIPE.step, channels_last=True))


@pytest.mark.parametrize(
    ("microbatches", "speeds", "expected"),
    [
        (8, [1.0, 1.0], [4, 4]),
        (8, [2.0, 1.0], [5, 3]),
        (8, [100.0, 1.0, 100.0], [4, 1, 3]),
    ],
)
def test_microbatches_are_divided_by_speed(microbatches: int, speeds: list[float], expected: list[int]) -> None:
    assert divide(microbatches, speeds) == expected
