"""Recipe `images` on generated images."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file

from helpers.system import events, here, samestep, without_warnings
from samestep.errors import DataError
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.images import LabeledImages, Sample, load_images

make_torchvision_importable()

from torchvision.transforms.v2.functional import pil_to_tensor  # noqa: E402

SHAPES = ("disc", "square", "stripes")
SMALL = ("data.options.image_size=32", "batch_size=12", "microbatches=4", "epochs=2", "metrics=[]")
STEPS = 8  # four fifths of 60 images, four steps an epoch


def drawn(shape: str, number: int) -> Image.Image:
    """Draw a shape of random size and color."""
    width, height = 36 + 3 * number, 64 - 2 * number
    image = Image.new("RGB", (width, height), (12 * number, 40, 90))
    draw = ImageDraw.Draw(image)
    colour = (250 - 5 * number, 11 * number % 256, 200)
    box = (8, 6, 8 + 20, 6 + 20)
    if shape == "disc":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        for x in range(0, width, 8):
            draw.line((x, 0, x, height), fill=colour, width=3)
    return image


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three classes of twenty JPEGs, one of them gray, and a partly transparent PNG."""
    root = tmp_path_factory.mktemp("images") / "pictures"
    for shape in SHAPES:
        (root / shape).mkdir(parents=True)
        for number in range(20):
            drawn(shape, number).save(root / shape / f"{number:02}.jpg")
    drawn("disc", 3).convert("L").save(root / "disc" / "03.jpg")
    (root / "square" / "05.jpg").unlink()
    see_through = drawn("square", 5).convert("RGBA")
    see_through.putalpha(100)
    see_through.save(root / "square" / "05.png")
    return root


def train(pictures: Path, place: Path, name: str, *arguments: object, overrides: tuple[str, ...] = ()) -> Path:
    """Train, and return the run directory."""
    chosen = (f"data.options.path={pictures}", *SMALL, *overrides)
    assert here("train", "images", "--name", name, *arguments, *chosen, cwd=place) == 0
    return place / "runs" / name


# --- training --------------------------------------------------------------------------------------------


SMALLER = ("model.name=torchvision:resnet18",)


@pytest.fixture(scope="module")
def one(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run on one process without data workers."""
    return train(pictures, tmp_path_factory.mktemp("one"), "one", "--workers", 0, overrides=SMALLER)


@pytest.mark.slow
def test_a_run_is_evaluated_on_another_dataset(one: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A dataset with other classes is refused: their numbers would mean other names."""
    for folder, names in (("more", SHAPES), ("other", ("circle", *SHAPES[1:]))):
        for shape, name in zip(SHAPES, names, strict=True):
            (tmp_path / folder / name).mkdir(parents=True)
            for number in range(3):
                drawn(shape, number).save(tmp_path / folder / name / f"{number}.png")
    more, other = tmp_path / "more", tmp_path / "other"
    capfd.readouterr()
    assert here("eval", one, "--json", more, cwd=tmp_path) == 0
    assert json.loads(capfd.readouterr().out)["samples"] == 9
    assert here("eval", one, other, cwd=tmp_path) == 2
    assert "[E_CLASSES]" in capfd.readouterr().err


FROZEN = ("conv1.", "bn1.", "layer1.")


@pytest.mark.parametrize(
    "ending", [pytest.param("safetensors", marks=pytest.mark.slow), pytest.param("pth", marks=pytest.mark.long)]
)
def test_pretrained_weights_and_frozen_layers(pictures: Path, tmp_path: Path, ending: str) -> None:
    """The model is that of the shipped recipe, on two processes."""
    state = resnet34(classes=7)
    file = tmp_path / f"state.{ending}"
    if ending == "pth":
        torch.save(state, file)
    else:
        save_file(state, file)
    overrides = (
        f"data.options.path={pictures}",
        *SMALL,
        "epochs=1",
        f"model.pretrained={file}",
        "model.freeze=[conv1.*, bn1.*, layer1.*]",
    )
    done = samestep("train", "images", "--name", "a", "--processes", 2, *overrides, cwd=tmp_path)
    assert done.code == 0, done.err
    notes = [line for line in without_warnings(done.err) if not line.startswith("epoch")]
    assert notes == [
        f"pretrained: {len(state) - 2} tensors taken, 2 left out",
        "  left out fc.weight: (3, 512) here, (7, 512) in the file",
        "  left out fc.bias: (3,) here, (7,) in the file",
        "frozen: 21 of 110 parameters",
    ]
    assert [event["text"] for event in events(tmp_path / "runs" / "a", "note")][: len(notes)] == notes

    folder = tmp_path / "runs" / "a" / "checkpoints" / "last"
    trained = load_file(folder / "model.safetensors")
    assert trained.keys() == state.keys()
    assert trained["fc.weight"].shape == (3, 512)
    for name, tensor in state.items():
        if not name.startswith("fc."):
            assert torch.equal(trained[name], tensor) == name.startswith(FROZEN), name
    moved = {name.removeprefix("momentum_buffer/") for name in load_file(folder / "optimizer.safetensors")}
    assert moved == {name for name in state if name.endswith((".weight", ".bias")) and not name.startswith(FROZEN)}


def resnet34(classes: int) -> dict[str, torch.Tensor]:
    """Return weights of another task with random batch norm statistics."""
    from torchvision.models import resnet34 as build

    with torch.random.fork_rng():
        torch.manual_seed(1)
        state: dict[str, torch.Tensor] = build(num_classes=classes).state_dict()
        for name, tensor in state.items():
            if name.endswith("running_mean"):
                tensor.normal_(std=0.1)
            elif name.endswith("num_batches_tracked"):
                tensor.fill_(100)
    return state


# --- the data --------------------------------------------------------------------------------------------


def names(files: object, root: Path) -> set[str]:
    assert isinstance(files, LabeledImages)
    return {path.relative_to(root).as_posix() for path, *_ in files.samples}


def split(root: Path, fraction: float = 0.2) -> tuple[set[str], set[str]]:
    """Return the names of the training and validation images."""
    splits = load_images(str(root), evaluation_fraction=fraction, image_size=32)
    return names(splits.train, root), names(splits.evaluation, root)


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_split_is_disjoint_complete_and_stratified(pictures: Path, fraction: float) -> None:
    train, evaluation = split(pictures, fraction)
    assert not train & evaluation
    assert train | evaluation == {path.relative_to(pictures).as_posix() for path in pictures.rglob("*.*g")}
    for shape in SHAPES:
        here_too = [sum(name.startswith(shape) for name in part) for part in (train, evaluation)]
        assert min(here_too) >= 1
    assert split(pictures, fraction) == (train, evaluation)


def test_split_is_stable_when_images_are_added(pictures: Path, tmp_path: Path) -> None:
    root = shutil.copytree(pictures, tmp_path / "more")
    train, evaluation = split(root)
    for number in range(20):
        shutil.copy(root / "disc" / "00.jpg", root / "disc" / f"new-{number:02}.jpg")
    train_now, evaluation_now = split(root)
    assert len(train_now | evaluation_now) == 80
    assert train <= train_now
    assert evaluation <= evaluation_now


def test_folders_of_splits_are_no_classes(pictures: Path, tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / name).symlink_to(pictures)
    with pytest.raises(DataError, match=r"path=\S+/train data\.options\.evaluation_path=\S+/val"):
        load_images(str(tmp_path))


def test_other_files_and_hidden_ones_are_no_images(pictures: Path, tmp_path: Path) -> None:
    root = shutil.copytree(pictures, tmp_path / "more")
    for name in ("disc/._00.jpg", "disc/.ipynb_checkpoints/00-checkpoint.jpg", "disc/notes.txt", "disc/new.JFIF"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / "disc" / "00.jpg", root / name)
    drawn("disc", 2).save(root / "disc" / "new.ppm")
    splits = load_images(str(root), image_size=32)
    assert len(splits.train) + len(splits.evaluation) == 62


# --- images that are none --------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    ending=st.sampled_from(["jpg", "png", "bmp", "gif", "tiff", "webp"]),
    cut=st.floats(0, 1),
    flips=st.lists(st.floats(0, 1), max_size=4),
)
def test_damaged_image_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, ending: str, cut: float, flips: list[float]
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged.{ending}"
    drawn("disc", 2).save(path)
    data = bytearray(path.read_bytes())
    for flip in flips:
        data[int(flip * (len(data) - 1))] ^= 0x55
    path.write_bytes(data[: int(cut * len(data))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about damaged data that it can read
        try:
            LabeledImages([Sample(path, 0)], pil_to_tensor)[0]
        except DataError as error:
            assert str(path) in error.value
