"""`samestep verify` names the cause of every planted mistake and accepts every correct script."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.system import answer, here
from samestep.errors import EXIT_DIFFERS, EXIT_DONE
from samestep.tools.verify.causes import Cause

FOLDER = Path(__file__).parent
RESUMED = ("--kill-at", "3", "--resume-on", "2", "--", "{folder}")

# Cause of each mistake, and a text in the location or the evidence.
MISTAKES = {
    "augmentation_by_rank": (Cause.AUGMENTATION, "samples depend on the process"),
    "augmentation_unseeded": (Cause.AUGMENTATION, "117 samples differ"),
    "batch_norm_of_own_rows": (Cause.BATCH_NORM, "batch_norm='local'"),
    "batch_size_by_world_size": (Cause.DATA_ORDER, "16 samples and 32 samples"),
    "break_on_main": (Cause.DIVERGED, "rank 0"),
    "clipping_by_world_size": (Cause.SETTINGS, "clip_grad_norm_ [0.1] and [0.2]"),
    "data_order_by_hand": (Cause.DATA_ORDER, "position 1 of the batch"),
    "data_order_contents_by_rank": (Cause.DATA_ORDER, "targets differ together with inputs"),
    "data_order_length_by_rank": (Cause.DATA_ORDER, "position 0 of the batch"),
    "data_order_permuted": (Cause.DATA_ORDER, "other samples of the dataset"),
    "data_order_seed": (Cause.DATA_ORDER, "step 1, batch 1"),
    "data_order_unseeded": (Cause.DATA_ORDER, "run twice"),
    "draws_on_main": (Cause.MODEL_RANDOM, "random generators"),
    "evaluation_mean_of_batches": (Cause.EVALUATION, "'accuracy 0.448864 in 0.1 s' and"),
    "evaluation_mean_of_ranks": (Cause.EVALUATION, "evaluation, arguments"),
    "evaluation_on_main_only": (Cause.DIVERGED, "Net in evaluation and Net in training"),
    "evaluation_padded": (Cause.EVALUATION, "15 samples and 16 samples"),
    "gradient_summed_twice": (Cause.LOSS, "2 times as long"),
    "initial_weights_by_rank": (Cause.INITIAL_WEIGHTS, "samestep.parallel, 0.bias, ranks 0 and 1"),
    "initial_weights_by_size": (Cause.INITIAL_WEIGHTS, "samestep.parallel, 0.bias"),
    "kernel_in_any_order": (Cause.KERNEL, "call 1 of Plain"),
    "last_batch_dropped": (Cause.LAST_BATCH, "21 samples"),
    "last_batch_padded": (Cause.LAST_BATCH, "21 samples and 22 samples"),
    "learning_rate_by_rank": (Cause.LEARNING_RATE, "[0.1] and [0.05]"),
    "learning_rate_by_world_size": (Cause.LEARNING_RATE, "[0.05] and [0.1]"),
    "loss_by_world_size": (Cause.LOSS, "not rounding"),
    "microbatches_by_world_size": (Cause.MICROBATCHES, "microbatches=2 and microbatches=4"),
    "model_in_ddp": (Cause.FAILED, "Default process group has not been initialized"),
    "model_seeds_by_rank": (Cause.MODEL_RANDOM, "call 1 of Plain"),
    "model_unseeded": (Cause.MODEL_RANDOM, "run twice"),
    "optimizer_by_rank": (Cause.SETTINGS, "ranks 0 and 1: momentum 0.9 and None"),
    "order_of_a_directory": (Cause.ARBITRARY_ORDER, "directory listings"),
    "order_of_a_set": (Cause.ARBITRARY_ORDER, "hash seed"),
    "parameter_on_one_rank": (Cause.UNSYNCHRONISED, "0.bias is a parameter"),
    "reduction_plain": (Cause.REDUCTION, "in float64 the distance is"),
    "resume_weights_only": (Cause.RESUME, "step 3"),
    "sampler_of_ranks": (Cause.DATA_ORDER, "sample 1 and sample 2"),
    "schedule_by_world_size": (Cause.LEARNING_RATE, "step 3"),
    "threads_by_world_size": (Cause.THREADS, "with one thread per rank"),
}
# Mistakes if equal bits are required.
OF_BITS = ("reduction_plain", "threads_by_world_size")
# Scripts whose calls are computed whole.
WHOLE = ("buffer_as_attribute", "buffer_for_evaluation", "buffer_in_a_dict", "buffer_of_a_running_mean")
WHOLE += ("model_own_generator", "model_stores_last_output", "unused_parameters")
EQUAL = ("order of samples", "inputs as augmented", "targets", "learning rates")
RIGHT = sorted(path.stem.removeprefix("right_") for path in FOLDER.glob("right_*.py"))


def marked(names: Sequence[str], frequent: str) -> list[Any]:
    """Mark the test of a frequent script as slow, the others as long."""
    return [pytest.param(name, marks=pytest.mark.slow if name == frequent else pytest.mark.long) for name in names]


def verify(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the certificate."""
    # Some scripts hang. They are small; the imports of a recipe take seconds on a busy machine.
    patience = 30 if str(arguments[0]).endswith(".py") else 60
    code = here("verify", "--json", "--out", folder, "--patience", patience, *arguments, cwd=FOLDER)
    certificate: dict[str, Any] = answer(capsys)
    return code, certificate


def test_every_script_is_listed() -> None:
    assert {path.stem.removeprefix("wrong_") for path in FOLDER.glob("wrong_*.py")} == set(MISTAKES)
    assert len(MISTAKES) >= 16
    assert len(RIGHT) >= 16


def options_of(name: str) -> tuple[str, ...]:
    return ("--exact",) if name in OF_BITS else ()


@pytest.mark.parametrize("name", marked(list(MISTAKES), "augmentation_by_rank"))
def test_cause_of_a_mistake_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    resumed = RESUMED if name.startswith("resume") else ()
    code, certificate = verify(
        capsys, tmp_path, f"wrong_{name}.py", "--processes", "1,2,4", *options_of(name), *resumed
    )
    cause, text = MISTAKES[name]
    [finding] = certificate["findings"]
    assert finding["cause"] == cause
    assert text in " ".join([str(finding["where"]), *finding["evidence"]])
    assert (code, certificate["holds"]) == (EXIT_DIFFERS, False)


@pytest.mark.parametrize("name", marked(RIGHT, "model_draws"))
def test_correct_script_is_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    resumed = RESUMED if name.startswith("resume") else ()
    code, certificate = verify(capsys, tmp_path, f"right_{name}.py", "--processes", "1,3", *resumed)
    assert (code, certificate["holds"], certificate["findings"]) == (EXIT_DONE, True, [])
    assert certificate["steps"]
    for run in certificate["comparisons"]:
        quantities = run["quantities"]
        assert "differs" not in quantities.values()
        equal = quantities if name == "reduction_exact" else EQUAL
        assert {quantities[key] for key in equal} <= {"bits", "-"}
    calls = certificate["calls"]["3"]
    assert any(module["divided"] for module in calls) is (name not in WHOLE)
    assert all(module["reasons"] for module in calls if module["whole"])


@pytest.mark.long
def test_recipe_with_class_weights_is_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, certificate = verify(
        capsys, tmp_path, "right_class_weights.yaml", "--processes", "1,3", "--kill-at", "2", "--resume-on", "4"
    )
    assert (code, certificate["holds"]) == (EXIT_DONE, True)


@pytest.mark.slow
def test_mistake_is_not_accepted_as_rounding(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("batch_norm_of_own_rows", "loss_by_world_size", "learning_rate_by_world_size"):
        code, certificate = verify(capsys, tmp_path, f"wrong_{name}.py", "--processes", "1,2", "--double")
        assert (code, certificate["findings"][0]["cause"]) == (EXIT_DIFFERS, MISTAKES[name][0])
        assert float(certificate["tolerances"]["gradients"]) < 1e-10
