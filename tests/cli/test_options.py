"""Options of several commands: unknown names, batch sizes, and strategies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.system import answer, events, here, weights
from samestep.errors import EXIT_DONE
from samestep.recipes.recipe_files import read_recipe
from samestep.recipes.yaml_text import from_yaml

# --- unknown options and keys ---

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
Refused = Callable[..., str]

OPTIONS = {
    "train digits --gpus 4": "--processes",
    "train digits --nproc_per_node=2": "--processes",
    "train --lr 0.1 digits": "optimizer.options.lr=0.1?",
    "train digits --lr=0.1": "optimizer.options.lr=0.1?",
    "train digits --lr": "optimizer.options.lr=VALUE?",
    "train digits -b 32": "batch_size=32?",
    "train digits --set epochs=2 batch_size=32": "samestep train digits epochs=2 batch_size=32",
    "train digits --set=epochs=2": "samestep train digits epochs=2",
    "train digits --max_restarts 2": "--max-restarts",
    "train digits --proceses 2": "--processes",
    "train digits --foo 2020-99-99": "train --help",
    "top runs/first --gpus 2": "samestep top --help",
    "run --gpus 2 train.py": "--processes",
}
KEYS = {
    "learning_rate.lr=0.1": "optimizer.options.lr=0.1?",
    "batchsize=64": "batch_size=64?",
    "optimizer.option.lr=1": "optimizer.options.lr=1?",
    "accumulation_steps=4": "--accumulate 4?",
    "data.num_workers=8": "--workers 8?",
    "schedule.warmup=1": "schedule.warmup_epochs=1?",
    "step.sed=1": "step.seed=1?",
    "epoks=2": "did you mean epochs=2?",
    "precison=2": "did you mean step.precision=2?",
    "momentun=2": "did you mean optimizer.options.momentum=2?",
    "qwertz=1": "remove qwertz",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_unknown_option_names_the_nearest(refused: Refused, command: str) -> None:
    err = refused(*command.split())
    assert "[E_UNKNOWN_OPTION]" in err
    assert OPTIONS[command] in err.splitlines()[-1]


@pytest.mark.parametrize("override", KEYS)
def test_unknown_key_names_the_nearest(refused: Refused, override: str) -> None:
    err = refused("train", "digits", override)
    assert "[E_UNKNOWN_KEY]" in err
    assert KEYS[override] in err.splitlines()[-1]


ARGUMENTS = {
    "train images foto": "did you mean photos?",
    "train images photo/": "did you mean photos?",
    "train digits epochs 5": "did you mean epochs=5?",
    "train digits 5": "give the path",
    "eval runs/first foto": "did you mean photos?",
}


@pytest.mark.parametrize("command", ARGUMENTS)
def test_argument_that_is_neither_a_setting_nor_a_path(refused: Refused, tmp_path: Path, command: str) -> None:
    (tmp_path / "photos").mkdir()
    err = refused(*command.split())
    assert "is neither a setting nor a path" in err.splitlines()[0]
    assert ARGUMENTS[command] in err.splitlines()[-1]


@pytest.mark.parametrize("place", ["photos", "~/photos", "$PLACE/photos", "./photos"])
def test_path_is_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", str(tmp_path))
    (tmp_path / "photos").mkdir()
    command = ("train", "images", "--print", place, "lr=0.5", "--exact")
    assert here(*command, "--json", cwd=tmp_path) == EXIT_DONE
    printed = answer(capsys)
    assert here(*command, cwd=tmp_path) == EXIT_DONE
    assert from_yaml(capsys.readouterr().out) == printed["recipe"]
    path = Path(printed["recipe"]["data"]["options"]["path"])
    assert path in (tmp_path / "photos", Path("photos"))
    assert printed["recipe"]["optimizer"]["options"]["lr"] == 0.5
    assert printed["recipe"]["step"]["reduction"] == "exact"
    assert not (tmp_path / "runs").exists()


def test_unknown_key_is_reported_before_a_missing_one(refused: Refused, tmp_path: Path) -> None:
    text = RECIPE.read_text(encoding="utf-8").replace("epochs: 3", "num_epochs: 3")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert "did you mean epochs?" in refused("train", "mine.yaml")


# --- batch size ---

ONE_EPOCH = ("epochs=1",)


def test_batch_is_saved_in_the_recipe_and_scales_the_learning_rate(tmp_path: Path) -> None:
    rule = "learning_rate={rule: linear, base_batch_size: 6}"
    arguments = ("--processes", 2, "--per-device-batch-size", 6, "--name", "a", "epochs=1", rule)
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    run = tmp_path / "runs" / "a"
    assert read_recipe(run / "recipe.yaml").batch_size == 12
    assert len(events(run, "step")) == 9
    note, *_ = events(run, "note")
    assert note["text"] == "learning rate 0.02 = 0.01 x 12/6 (linear)"


def test_recipe_has_no_per_device_batch_size(refused: Refused, tmp_path: Path) -> None:
    err = refused("train", "digits", "per_device_batch_size=32")
    assert "unknown key per_device_batch_size" in err.splitlines()[0]
    assert "did you mean --per-device-batch-size 32?" in err
    text = RECIPE.read_text(encoding="utf-8").replace("batch_size: 8", "per_device_batch_size: 8")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert "mine.yaml: unknown key per_device_batch_size" in refused("train", "mine.yaml").splitlines()[0]


def test_parts_of_a_batch_have_the_mean_of_the_whole(tmp_path: Path) -> None:
    """Without batch norm, whose statistics are those of a part."""
    losses = []
    for name, options in (("a", ("--accumulate", 3)), ("b", ())):
        settings = ("epochs=1", "batch_size=32", "data.options.lines=50", "model.options.dropout=0")
        assert here("train", "tokens", *options, "--name", name, *settings, cwd=tmp_path) == 0
        run = tmp_path / "runs" / name
        assert read_recipe(run / "recipe.yaml").accumulate == (3 if options else 1)
        losses.append([event["loss"] for event in events(run, "step")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_both_options(tmp_path: Path) -> None:
    arguments = ("--accumulate", 3, "--per-device-batch-size", 4, "--name", "a", *ONE_EPOCH)
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    recipe = read_recipe(tmp_path / "runs" / "a" / "recipe.yaml")
    assert (recipe.batch_size, recipe.accumulate) == (12, 3)


INVALID = {
    "--per-device-batch-size 32 --processes auto": "E_BATCH_SIZE",
    "--per-device-batch-size 32 --processes abc": "E_BATCH_SIZE",
    "--per-device-batch-size 32 batch_size=64": "E_BATCH_SIZE",
    "--per-device-batch-size 0": "E_VALUE",
    "--per-device-batch-size 3 microbatches=8": "E_BATCH_SIZE",
    "--per-device-batch-size 3 --processes 9 microbatches=8": "E_TOO_MANY_RANKS",
    "--accumulate 0": "E_VALUE",
    "--accumulate 4 accumulate=4": "E_BATCH_SIZE",
    "--accumulate 100": "E_BATCH_SIZE",
}


@pytest.mark.parametrize("options", INVALID)
def test_invalid_combinations_are_errors(refused: Refused, options: str) -> None:
    assert f"[{INVALID[options]}]" in refused("train", "digits", *options.split()).splitlines()[0]


# --- strategy ---

LANGUAGE = (
    "language",
    "model.options.n_embd=32",
    "model.options.n_head=4",
    "model.options.n_layer=2",
    "data.options.train_tokens=4000",
    "data.options.evaluation_tokens=640",
)


@pytest.mark.parametrize("mesh", ["tensor", "tensor=0", "tensor=x", "rows=2", "tensor=2,tensor=2", "tensor=2;shard=2"])
def test_invalid_mesh_is_an_error(refused: Refused, mesh: str) -> None:
    assert f"error: --mesh {mesh} [E_MESH]\n  expected: AXIS=N" in refused("train", RECIPE, "--mesh", mesh)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs `single`, on one process, and `divided`, with `fsdp` on four processes."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, chosen in (("single", ()), ("divided", ("--strategy", "fsdp", "--processes", 4))):
        code = here("train", "digits", *chosen, "--name", name, "epochs=1", "step.threads=1", cwd=folder)
        assert code == EXIT_DONE
    return folder


@pytest.mark.slow
def test_divided_run_equals_one_process_to_rounding(two_runs: Path) -> None:
    single, divided = (two_runs / "runs" / name for name in ("single", "divided"))
    (one,), (four,) = events(single, "evaluation"), events(divided, "evaluation")
    assert four["samples"] == one["samples"] == 360
    assert four["train_loss"] == pytest.approx(one["train_loss"], rel=1e-2)
    assert [event["loss"] for event in events(divided, "step")][:3] == pytest.approx(
        [event["loss"] for event in events(single, "step")][:3], rel=1e-5
    )
    (note,) = [event["text"] for event in events(divided, "note") if event["text"].startswith("mesh")]
    assert note.splitlines()[0] == "mesh fsdp: shard 4"
    (facts,) = json.loads((divided / "environment.json").read_text())
    assert facts["strategy"] == "fsdp"


@pytest.mark.slow
def test_checkpoint_of_a_divided_run_has_the_same_format(two_runs: Path) -> None:
    single, divided = (two_runs / "runs" / name / "checkpoints" / "last" for name in ("single", "divided"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, four = load_file(single / file), load_file(divided / file)
        assert {name: (t.shape, t.dtype) for name, t in one.items()} == {
            name: (t.shape, t.dtype) for name, t in four.items()
        }
    one, four = (json.loads((folder / "state.json").read_text()) for folder in (single, divided))
    assert one["optimizer"] == four["optimizer"]
    assert one["aliases"] == four["aliases"]


@pytest.mark.long
@pytest.mark.slow
def test_run_is_evaluated_and_resumed_with_another_strategy(two_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = two_runs / "runs" / "divided"
    results = []
    for chosen in ((), ("--processes", 3), ("--processes", 4, "--strategy", "hsdp", "--mesh", "shard=2")):
        capsys.readouterr()
        assert here("eval", run, *chosen, "--json", cwd=two_runs) == EXIT_DONE
        results.append(answer(capsys))
    assert results[1] == results[0]
    assert results[2]["loss"] == pytest.approx(results[0]["loss"], rel=1e-5)
    before = weights(run)
    assert here("resume", run, "--strategy", "ddp", "--processes", 2, cwd=two_runs) == EXIT_DONE
    assert weights(run) == before


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "mesh", "processes"),
    [
        ("fsdp", "", "1,2"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("ddp", "", "1,2"),
                ("pp", "", "1,2"),
                ("tp", "", "1,2"),
                ("fsdp", "", "1,2,3"),
                ("hsdp", "shard=2", "1,4"),
                ("ddp", "tensor=2", "1,4"),
                ("ddp", "pipeline=2", "1,4"),
                ("pp", "pipeline=2", "1,4"),
            )
        ),
    ],
)
def test_certificate_of_a_divided_model_holds_within_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str, mesh: str, processes: str
) -> None:
    options: tuple[object, ...] = ("--strategy", strategy, *(("--mesh", mesh) if mesh else ()), "--double")
    recipe: tuple[object, ...] = LANGUAGE
    if strategy in ("fsdp", "hsdp"):
        recipe = ("digits",)
    if strategy in ("fsdp", "pp") and not mesh:
        options = (*options, "--kill-at", 2, "--resume-on", 2)
    certificate = verify(tmp_path, capsys, *recipe, *options, "step.reduction=fast", "--processes", processes)
    assert (certificate["level"], certificate["double"]) == ("rounding", True)
    for run in certificate["comparisons"]:
        assert run["quantities"]["order of samples"] == "bits"
        gradients = run["quantities"]["gradients"]
        assert gradients == "bits" or float(gradients) <= 1e-10


@pytest.mark.slow
def test_run_with_stages_is_resumed_on_one_process_and_back(tmp_path: Path) -> None:
    options = (*LANGUAGE, "ema.decay=0.9", "step.threads=1", "step.clip_norm=0.5", "epochs=1")
    stages = ("--strategy", "pp", "--processes", 2)
    for name, chosen in (("single", ()), ("stages", stages)):
        assert here("train", *options, *chosen, "--name", name, cwd=tmp_path) == EXIT_DONE
    resumed = ("epochs=2",)
    assert here("resume", "runs/single", *stages, *resumed, cwd=tmp_path) == EXIT_DONE
    assert here("resume", "runs/stages", "--strategy", "ddp", "--processes", 1, *resumed, cwd=tmp_path) == EXIT_DONE
    single, divided = (tmp_path / "runs" / name / "checkpoints" for name in ("single", "stages"))
    for checkpoint in ("epoch-1", "epoch-2"):
        for file in ("model", "optimizer", "average"):
            one, other = (load_file(folder / checkpoint / f"{file}.safetensors") for folder in (single, divided))
            assert list(one) == list(other)
            for name, tensor in one.items():
                torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)
    losses = [
        [event["loss"] for event in events(tmp_path / "runs" / name, "evaluation")] for name in ("single", "stages")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_exact_tensor_axis_has_the_bits_of_one_process_with_equal_slices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--strategy", "tp", "--exact", "--processes", "1,2", "step.tensor_slices=2")
    certificate = verify(tmp_path, capsys, *LANGUAGE, *options)
    assert certificate["level"] == "bits"
    assert [run["first_difference"] for run in certificate["comparisons"]] == [None]
    assert certificate["comparisons"][0]["quantities"]["optimizer state"] == "bits"


@pytest.mark.slow
def test_several_devices_per_rank_give_equal_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("strategy.devices=2", "strategy.place={stem: 0, blocks: 0, head: 1}")
    options = ("--strategy", "device_map", "--exact", *settings, "--processes", "1,2")
    certificate = verify(tmp_path, capsys, "digits", *options)
    assert certificate["level"] == "bits"
    assert [run["first_difference"] for run in certificate["comparisons"]] == [None]


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Verify two steps, and return the certificate, which must hold."""
    code = here("verify", *arguments, "--steps", 2, "--json", "--out", folder / "certificate", cwd=folder)
    certificate: dict[str, Any] = answer(capsys)
    assert (code, certificate["holds"], certificate["findings"]) == (EXIT_DONE, True, [])
    return certificate
