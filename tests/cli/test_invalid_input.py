"""Invalid input ends a command with exit code 2 and an error with value, expectation and fix, and changes no file."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers.permissions import without_access
from helpers.system import events, here, samestep, state_of, tree, weights
from samestep.cli import launch_options
from samestep.cli.main import main
from samestep.data.epoch_order import shuffled_order
from samestep.errors import EXIT_INPUT, EXIT_STOPPED
from samestep.launcher.launch import StoppedError
from samestep.zoo.images import LabeledImages, load_images

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
Refused = Callable[..., str]
CheckError = Callable[[str], None]


# --- recipes and options, checked before a rank starts ---

INVALID_VALUES = [
    "epochs=abc",
    "epochs=2.5",
    "epochs=true",
    "batch_size=null",
    "batch_size='64'",
    "microbatches=0",
    "metrics=[accuracy, accuracy]",
    "schedule.name=polynomial",
    "step.reduction=Exact",
    "step.clip_norm=0",
    "model.freeze=layer1.*",
    "data.options=3",
    "optimizer=sgd",
]


@pytest.mark.parametrize("override", INVALID_VALUES)
def test_invalid_value_is_an_error_with_key_and_value(refused: Refused, override: str) -> None:
    assert override.partition("=")[0] in refused("train", "digits", override).splitlines()[0]


INVALID_OVERRIDES = {
    "batch_size": "E_FILE_MISSING",
    "=3": "E_FILE_MISSING",
    "epochs=[1": "E_VALUE",
    "batch_size.x=1": "E_UNKNOWN_KEY",
    "data.name.x=1": "E_UNKNOWN_KEY",
}


@pytest.mark.parametrize("override", INVALID_OVERRIDES)
def test_invalid_setting_is_an_error(refused: Refused, override: str) -> None:
    title = refused("train", "digits", override).splitlines()[0]
    assert override in title
    assert title.endswith(f"[{INVALID_OVERRIDES[override]}]")


def test_more_processes_than_devices_is_an_error(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_options, "gpu_names", lambda: ["GPU"] * 4)
    err = refused("train", "digits", "--devices", "0,2", "--processes", 3)
    assert "--processes 3 with --devices 0,2 [E_PROCESSES]" in err.splitlines()[0]


@pytest.mark.parametrize("sharing", ["1", "nccl"])
def test_more_processes_than_devices_may_share(sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_options, "gpu_names", lambda: ["GPU"] * 4)
    monkeypatch.setenv("SAMESTEP_SHARE_GPU", sharing)
    assert launch_options.LaunchOptions(devices="0,2", processes="3").process_range() == (3, 3)


OUT_OF_RANGE = {
    "--processes": ["0", "abc", "1.5", "", "0:2", "3:2", ":2", "auto:2", "1:9"],
    "--workers": ["-1"],
    "--checkpoint-every": ["0"],
    "--keep": ["0"],
    "--max-restarts": ["-1"],
    "--hang-after": ["0"],
    "--grace": ["-1s", "0s", "-5", "30 s", "nan", "5m30s", "9" * 400],
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in OUT_OF_RANGE.items() for value in values]
)
def test_option_out_of_range_is_an_error(refused: Refused, option: str, value: str) -> None:
    err = refused("train", "digits", f"{option}={value}")
    if option in ("--processes", "--grace") and ":" not in value:
        assert f"{option} {value}" in err.splitlines()[0]
    assert option != "--grace" or "--grace 30s" in err


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "", "a\nb"])
def test_name_of_a_run_is_that_of_a_folder(refused: Refused, name: str) -> None:
    assert f"the name of the run is {name!r} [E_RUN_NAME]" in refused("train", RECIPE, f"--name={name}")


def test_batch_size_below_microbatches_is_an_error(refused: Refused) -> None:
    assert "[E_BATCH_SIZE]" in refused("train", "digits", "batch_size=4").splitlines()[0]


@pytest.mark.parametrize("arguments", ["train {}.yaml", "train digits --runs={}", "resume {}", "eval {}"])
def test_name_that_is_too_long_for_a_file(refused: Refused, arguments: str) -> None:
    err = refused(*arguments.format("x" * 300).split())
    assert "File name too long [E_UNREADABLE]" in err.splitlines()[0]


USAGE = {
    "trian digits": "E_UNKNOWN_NAME",
    "train": "E_MISSING_KEY",
    "train digits b": "E_FILE_MISSING",
    "train digits --strategy fsd": "E_VALUE",
    "train digits --workers two": "E_VALUE",
    "train digits --hang-after -5s": "E_VALUE",
    "train digits --s 3": "E_UNKNOWN_OPTION",
    "train digits --share-gpu=3": "E_VALUE",
}


@pytest.mark.parametrize("command", USAGE)
def test_invalid_arguments_are_an_error(refused: Refused, command: str) -> None:
    err = refused(*command.split())
    assert f"[{USAGE[command]}]" in err.splitlines()[0]
    assert "usage:" not in err


def test_unknown_recipe_or_command_is_an_error_with_the_nearest(refused: Refused) -> None:
    assert "did you mean samestep train digits?" in refused("train", "digit")
    assert "did you mean samestep train digits?" in refused("trian", "digits")
    assert "digits" in refused("train", "cooking")


BROKEN_RECIPES = {
    "missing": None,
    "not YAML": "data: [",
    "a list": "- data",
    "empty": "",
    "a date": "data: 2020-01-01",
    "incomplete": "data: {name: digits}\noptimizer: {name: sgd}\nbatch_size: 8\nepochs: 1",
    "part without a name": "data: {options: {}}\nmodel: {name: x}\noptimizer: {name: sgd}\nbatch_size: 8\nepochs: 1",
    "not UTF-8": b"data: \xff\xfe",
}


@pytest.mark.parametrize("kind", BROKEN_RECIPES)
def test_invalid_recipe_file_is_an_error(refused: Refused, tmp_path: Path, kind: str) -> None:
    text = BROKEN_RECIPES[kind]
    if text is not None:
        (tmp_path / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "mine.yaml" in refused("train", "mine.yaml").splitlines()[0]


def test_folder_as_a_recipe_is_an_error(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").mkdir()
    refused("train", "mine.yaml")


# --- names and options, checked by the ranks ---

NAMES = {
    "model.name=helpers.recorded:Nett": "Nett",
    "model.name=nowhere_at_all:Net": "nowhere_at_all",
    "model.name=digitsnet": "did you mean digits_net?",
    "model.name=samestep.errors:EXIT_DONE": "is a int",
    "data.name=helpers.recorded:not_a_splits": "Splits",
    "loss.name=crossentropy": "did you mean cross_entropy?",
    "optimizer.name=sdg": "did you mean sgd?",
    "metrics=[acuracy]": "accuracy",
    "model.options.widht=8": "model.options.widht",
    "data.options.sample=8": "did you mean data.options.samples?",
    "optimizer.options.learning_rate=1": "did you mean optimizer.options.lr?",
    "optimizer.options.lr=-1": "learning rate: -1",
    "optimizer.options.betas=[0.9]": "list index out of range [E_VALUE]",
    "loss.name=cross_entropy": "the model has 5 outputs per target",
    "loss={name: cross_entropy, options: {label_smoothing: -0.1}}": "label_smoothing is -0.1 [E_VALUE]",
    "model.freeze=[layer9.*]": "layer9.*",
    "model.freeze=['*']": "every parameter",
    "model.pretrained=none.safetensors": "none.safetensors",
}


@pytest.mark.parametrize("override", NAMES)
def test_unknown_name_or_option_is_an_error(refused: Refused, override: str) -> None:
    fixed = [] if override.startswith("data.name") else ["metrics=[]"]
    if override.startswith("data.name=helpers.recorded"):
        fixed = ["data.options={}"]
    assert NAMES[override] in refused("train", RECIPE, "--processes", 1, *fixed, override)


def test_invalid_pretrained_file_is_an_error(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("these are no weights", encoding="utf-8")
    (tmp_path / "text.pth").write_text("these are no weights", encoding="utf-8")
    torch.save({"epoch": 3, "model": {"0.weight": torch.zeros(1)}}, tmp_path / "nested.pth")
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    for name, message in {
        "text.safetensors": "cannot be read as weights",
        "text.pth": "cannot be read as weights",
        "nested.pth": "no tensor",
        "other.safetensors": "no tensor",
    }.items():
        err = refused("train", RECIPE, f"model.pretrained={name}")
        assert name in err.splitlines()[0]
        assert message in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_device_is_an_error(refused: Refused) -> None:
    assert "--device cpu" in refused("train", RECIPE, "--device", "cuda")


def test_several_ranks_report_once(tmp_path: Path, check_error: CheckError) -> None:
    arguments = ("train", RECIPE, "--processes", 3, "model.freeze=[layer9.*]")
    done = samestep(*arguments, cwd=tmp_path)
    assert (done.code, done.out) == (EXIT_INPUT, "")
    check_error(done.err)
    assert not tree(tmp_path)


# --- folders of images ---


def picture(path: Path, value: int = 90) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 16), (value, 3 * value % 256, 60)).save(path)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes of twelve pictures."""
    for name in ("dark", "light"):
        for number in range(12):
            picture(tmp_path / "pictures" / name / f"{number}.jpg", 20 * number)
    return tmp_path / "pictures"


TINY = (
    "model.name=helpers.recorded:Pooled",
    "data.options.image_size=16",
    "data.options.path=pictures",
    "batch_size=4",
    "microbatches=2",
    "epochs=2",
    "metrics=[]",
)


def train_pictures(refused: Refused, *overrides: str) -> str:
    return refused("train", "images", "--processes", 1, *TINY, *overrides)


def test_images_without_a_folder(refused: Refused) -> None:
    err = refused("train", "images", "model.name=helpers.recorded:Pooled")
    assert "data.options.path is missing [E_MISSING_KEY]" in err
    assert f"there is no folder pictures in {Path.cwd()} [E_FILE_MISSING]" in train_pictures(refused)


def test_images_with_unusable_classes(refused: Refused, pictures: Path, tmp_path: Path) -> None:
    picture(tmp_path / "others" / "dark" / "0.jpg")
    picture(tmp_path / "others" / "grey" / "0.jpg")
    assert "grey, light" in train_pictures(refused, "data.options.evaluation_path=others")
    assert "evaluation_fraction" in train_pictures(refused, "data.options.evaluation_fraction=1")
    (pictures / "empty").mkdir()
    assert "class 'empty' has no images" in train_pictures(refused)
    picture(pictures / "empty" / "0.jpg")
    assert "class 'empty' has only one image" in train_pictures(refused)
    shutil.rmtree(pictures / "empty")
    shutil.rmtree(pictures / "light")
    assert "pictures has 1 class folder" in train_pictures(refused)


def spoil(path: Path, kind: str) -> None:
    if kind == "text":
        path.write_text("this is no image", encoding="utf-8")
    else:
        path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize("kind", ["text", "truncated"])
def test_images_none_of_which_can_be_read(refused: Refused, pictures: Path, kind: str) -> None:
    for path in pictures.rglob("*.jpg"):
        spoil(path, kind)
    err = train_pictures(refused)
    assert re.search(r"error: .*pictures/(dark|light)/\d+\.jpg cannot be read", err)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_unreadable_image_loses_no_completed_step(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int, check_error: CheckError
) -> None:
    """The steps before the image are saved; with the repaired image, the resumed run gives the same weights."""
    late = in_a_later_step(pictures)
    intact = late.read_bytes()
    spoil(late, "truncated")
    arguments = ("--processes", 2, "--workers", workers, "--name", "a")
    assert here("train", "images", *arguments, *TINY, cwd=tmp_path) == EXIT_INPUT
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[0].startswith(f"error: {late.relative_to(tmp_path)} cannot be read")
    check_error(output.err)
    assert state_of(tmp_path / "runs" / "a")["cursor"] == {"epoch": 0, "samples": 2 * 4}

    late.write_bytes(intact)
    assert here("resume", "runs/a", cwd=tmp_path) == 0
    assert here("train", "images", "--name", "reference", *TINY, cwd=tmp_path) == 0
    assert weights(tmp_path / "runs" / "a") == weights(tmp_path / "runs" / "reference")


@pytest.mark.slow
def test_unreadable_image_in_evaluation_loses_no_completed_step(pictures: Path, tmp_path: Path) -> None:
    files = load_images(str(pictures), image_size=16).evaluation
    assert isinstance(files, LabeledImages)
    path = files.samples[-1][0]
    intact = path.read_bytes()
    spoil(path, "text")
    assert here("train", "images", "--processes", 2, "--name", "a", *TINY, cwd=tmp_path) == EXIT_INPUT
    run = tmp_path / "runs" / "a"
    assert state_of(run)["cursor"] == {"epoch": 1, "samples": 0}

    path.write_bytes(intact)
    assert here("resume", run, cwd=tmp_path) == 0
    assert here("train", "images", "--name", "reference", *TINY, cwd=tmp_path) == 0
    reference = tmp_path / "runs" / "reference"
    assert weights(run) == weights(reference)
    assert [event["train_loss"] for event in events(run, "evaluation")] == [
        event["train_loss"] for event in events(reference, "evaluation")
    ]


def in_a_later_step(pictures: Path) -> Path:
    """Return a training image of the third batch of the first epoch."""
    train = load_images(str(pictures), image_size=16).train
    assert isinstance(train, LabeledImages)
    index = int(shuffled_order(len(train), seed=0, epoch=0)[2 * 4])
    return train.samples[index][0]


# --- runs and their checkpoints ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one epoch."""
    folder = tmp_path_factory.mktemp("finished")
    assert here("train", RECIPE, "--name", "a", "epochs=1", cwd=folder) == 0
    return folder / "runs" / "a"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "runs" / "a", symlinks=True)


def test_existing_run_is_not_overwritten(refused: Refused, run: Path) -> None:
    err = refused("train", RECIPE, "--name", "a")
    assert "the run runs/a exists" in err
    assert "samestep resume runs/a" in err
    run.rename(run.parent / "a b")
    assert "samestep resume 'runs/a b'" in refused("train", RECIPE, "--name", "a b")


def test_file_as_folder_of_runs_is_an_error(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "file" in refused("train", RECIPE, "--runs", "file", "--name", "a").splitlines()[0]


UNREADABLE = {
    "": (
        "eval runs/a",
        "predict runs/a recipe.yaml",
        "export runs/a",
        "diff runs/a runs/b",
        "report runs/a --out report.html",
        "top runs/a --once",
    ),
    "recipe.yaml": ("report runs/a --out report.html", "top runs/a --once"),
    "events.jsonl": ("report runs/a --out report.html", "top runs/a --once"),
    "ranks/rank-0.jsonl": ("top runs/a --once",),
    "environment.json": ("report runs/a --out report.html", "top runs/a --once"),
}


@pytest.mark.parametrize(
    ("file", "command"), [(file, command) for file, commands in UNREADABLE.items() for command in commands]
)
def test_unreadable_run(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    check_error: CheckError,
    file: str,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("", encoding="utf-8")
    path = run / file
    mode = path.stat().st_mode
    path.chmod(0)
    with without_access():
        code = main(command.split())
    path.chmod(mode)
    err = capsys.readouterr().err
    assert code == EXIT_INPUT
    check_error(err)
    assert re.match(rf"error: runs/a/{file}.* cannot be read: .*Permission denied.* \[E_UNREADABLE]\n", err)


@pytest.mark.parametrize("command", ["top {} --once", "run {}", "predict runs/a {}", "export runs/a --out {}"])
def test_path_that_is_too_long(refused: Refused, run: Path, command: str) -> None:
    assert "File name too long" in refused(*command.format("x" * 300).split()).splitlines()[0]


@pytest.mark.parametrize("command", ["resume", "eval", "eval --report new/report"])
def test_folder_without_a_recipe_is_not_a_run(refused: Refused, tmp_path: Path, command: str) -> None:
    command, *options = command.split()
    assert "nowhere is not a run" in refused(command, "nowhere", *options)
    (tmp_path / "empty").mkdir()
    assert "empty is not a run" in refused(command, "empty")
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "file is not a run" in refused(command, "file")


@pytest.mark.parametrize("command", ["resume", "eval", "predict", "export"])
def test_run_of_a_script_is_continued_by_the_script(refused: Refused, run: Path, command: str) -> None:
    (run / "recipe.yaml").unlink()
    (run / "run.json").write_text("{}", encoding="utf-8")
    command, *options = command.split()
    further = {"predict": ["recipe.yaml"]}.get(command, options)
    (run.parents[1] / "recipe.yaml").write_text("", encoding="utf-8")
    err = refused(command, run, *further)
    assert f"{run} is the run of a script [E_SCRIPT]" in err
    assert "start the script again" in err


@pytest.mark.parametrize("command", ["resume", "eval"])
@pytest.mark.parametrize("which", ["worst", "99"])
def test_missing_checkpoint_is_an_error(refused: Refused, run: Path, command: str, which: str) -> None:
    err = refused(command, run, f"--checkpoint={which}")
    assert "[E_CHECKPOINT]" in err
    assert "steps: 13" in err


@pytest.mark.parametrize("command", [("resume", "--checkpoint=13"), ("resume", "--checkpoint=best"), ("eval",)])
def test_run_without_a_checkpoint_is_an_error(refused: Refused, run: Path, command: tuple[str, ...]) -> None:
    shutil.rmtree(run / "checkpoints")
    assert "steps: none" in refused(command[0], run, *command[1:])


def test_stopped_export_leaves_no_file(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run)

    def stop(*arguments: Any, **options: Any) -> Any:
        (run / "model-13.safetensors").write_bytes(b"half of the model")
        raise StoppedError("stopped before the end of a step")

    monkeypatch.setattr(launch_options, "run_workers", stop)
    assert main(["export", str(run)]) == EXIT_STOPPED
    assert tree(run) == before


@pytest.mark.parametrize("change", ["batch_size=16", "optimizer.options.lr=0.02", "model.options.extra=1"])
def test_resume_with_another_recipe_lists_the_differences(refused: Refused, run: Path, change: str) -> None:
    key, _, new = change.partition("=")
    err = refused("resume", run, change)
    assert re.search(rf"^    {re.escape(key)}: \S.* -> {new}$", err, re.MULTILINE)
    assert "model.pretrained=" in err


def test_resume_with_an_edited_recipe_lists_the_differences(refused: Refused, run: Path) -> None:
    file = run / "recipe.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("lr: 0.01", "lr: 0.02").replace("seed: 0", "seed: 3"), encoding="utf-8")
    err = refused("resume", run)
    assert "    optimizer.options.lr: 0.01 -> 0.02\n" in err
    assert "    step.seed: 0 -> 3\n" in err


def test_fix_for_another_recipe_works(run: Path, tmp_path: Path) -> None:
    """The error suggests a new run from the weights of the old one."""
    weights_file = run / "checkpoints" / "last" / "model.safetensors"
    overrides = ("epochs=1", "batch_size=16", f"model.pretrained={weights_file}")
    assert here("train", RECIPE, "--name", "b", *overrides, cwd=tmp_path) == 0
    notes = [event["text"] for event in events(tmp_path / "runs" / "b", "note")]
    assert notes[0] == f"pretrained: {len(load_file(weights_file))} tensors taken, 0 left out"
