"""The recipe for volumes and masks, on arrays that are made here."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mask_data import make_volumes
from samestep.errors import EXIT_DONE, DataError
from samestep.recipes.masks.code import IGNORED, MaskCode
from samestep.recipes.masks.pairs import Pair
from samestep.recipes.masks.volume_files import read_pair, read_volume, shape_of
from samestep.recipes.masks.volumes import RandomPatches, Tiles, Volumes, load_volumes, normalised, tiling, volumes_task
from system import answer, events, here, weights

SMALL = (
    "data.options.patch_size=[6, 8, 8]",
    "data.options.patches=2",
    "model.options.width=4",
    "model.options.levels=2",
    "batch_size=7",
    "shards=4",
    "epochs=1",
)


@pytest.fixture(scope="module")
def balls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_volumes(tmp_path_factory.mktemp("balls") / "balls", 10)


def train(data: Path, place: Path, name: str, processes: int, *overrides: str) -> Path:
    chosen = ("--name", name, "--processes", processes, "--workers", 0)
    options = ("volumes", "--set", f"data.options.path={data}", *SMALL, *overrides)
    assert here("train", *chosen, *options, cwd=place) == EXIT_DONE
    return place / "runs" / name


def told(run: Path) -> list[dict[str, Any]]:
    ignored = ("time", "samples_per_second")
    found = [*events(run, "note"), *events(run, "evaluation"), *events(run, "skipped")]
    return [{key: value for key, value in event.items() if key not in ignored} for event in found]


# --- training --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_processes_give_the_bits_of_one(balls: Path, tmp_path: Path) -> None:
    one, three = (train(balls, tmp_path, f"on-{processes}", processes) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert told(one) == told(three)
    [evaluation] = events(one, "evaluation")
    assert {"loss_pixel", "loss_dice", "dice", "iou"} <= evaluation.keys()
    assert evaluation["samples"] == len(load_volumes(str(balls), patch_size=[6, 8, 8]).evaluation)


@pytest.mark.slow
def test_volumes_that_are_bad_are_left_out_alike(balls: Path, tmp_path: Path) -> None:
    root = shutil.copytree(balls, tmp_path / "balls")
    splits = load_volumes(str(root))
    trained: Any = splits.train
    spoil_with_nan(trained._volumes.pairs[1].image)
    overrides = ("data.bad_samples=skip", "loss={name: bce_with_logits, options: {foreground_weight: from_masks}}")
    one, three = (train(root, tmp_path, f"on-{processes}", processes, *overrides) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert told(one) == told(three)
    [skipped] = events(one, "skipped")
    assert (skipped["split"], skipped["count"]) == ("training", 2)  # both of its patches
    assert "1 values that are not finite" in skipped["samples"][0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_certificate_with_a_kill_in_between(capsys: pytest.CaptureFixture[str], balls: Path, tmp_path: Path) -> None:
    chosen = ("--processes", "1,2,3", "--steps", "2", "--kill-at", "2", "--resume-on", "3", "--json", "--out", tmp_path)
    options = ("volumes", "--set", f"data.options.path={balls}", *SMALL)
    code = here("verify", *chosen, *options, cwd=tmp_path)
    said = answer(capsys)
    assert (code, said["holds"], said["findings"]) == (EXIT_DONE, True, [])
    for run in said["comparisons"]:
        assert set(run["quantities"].values()) == {"bits"}


# --- patches ---------------------------------------------------------------------------------------------


@given(length=st.integers(1, 200), side=st.integers(1, 60))
def test_tiles_of_an_axis_cover_it_once(length: int, side: int) -> None:
    covered = []
    for start, fresh in tiling(length, side):
        assert 0 <= start <= fresh
        assert start + side <= length or start == 0
        covered += range(fresh, min(length, start + side))
    assert covered == list(range(length))


@settings(max_examples=30)
@given(
    shape=st.tuples(*[st.integers(1, 13)] * 3),
    size=st.tuples(*[st.integers(1, 7)] * 3),
)
def test_tiles_count_every_voxel_once(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int, int], size: tuple[int, int, int]
) -> None:
    """Values of a mask are all there, as often as in the mask, whatever the patches' size."""
    folder = tmp_path_factory.getbasetemp()
    pair = Pair("v", folder / "v.npy", folder / "m.npy")
    numbers = numpy.arange(numpy.prod(shape)).reshape(shape)
    numpy.save(pair.image, numbers.astype(numpy.float32))
    numpy.save(pair.mask, numbers)
    code = MaskCode([f"class {number}" for number in range(max(2, numbers.size))])
    tiles = Tiles(Volumes([pair], code, None, 1), size)
    found = []
    for index in range(len(tiles)):
        patch, target = tiles[index]
        assert patch.shape == (1, *size)
        counted = target != IGNORED
        found += target[counted].tolist()
        values = torch.from_numpy(normalised(numbers.astype(numpy.float32), None)).flatten()
        assert torch.equal(patch[0][counted], values[target[counted]]), "what is counted is what is seen"
    assert sorted(found) == list(range(numbers.size))


def test_random_patches_are_decided_by_torchs_generator(balls: Path) -> None:
    splits = load_volumes(str(balls), patch_size=[6, 8, 8])
    assert len(splits.train) == 4 * 9
    with torch.random.fork_rng():
        found = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            found.append(splits.train[5])
    for first, second, third in zip(*found, strict=True):
        assert torch.equal(first, second)
        assert not torch.equal(first, third)


@pytest.mark.parametrize(("share", "least"), [(1.0, 100), (0.0, 0)])
def test_share_of_patches_with_foreground(tmp_path: Path, share: float, least: int) -> None:
    """One voxel of foreground in a large volume."""
    mask = numpy.zeros((20, 30, 40), numpy.uint8)
    mask[2, 29, 17] = 1
    pair = Pair("v", tmp_path / "v.npy", tmp_path / "m.npy")
    numpy.save(pair.image, mask.astype(numpy.float32))
    numpy.save(pair.mask, mask)
    patches = RandomPatches(Volumes([pair], MaskCode(), None, 1), (4, 4, 4), 100, share, flips=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hits = sum(bool((patches[index][1] == 1).any()) for index in range(100))
    assert least <= hits <= max(5, least)


def test_foreground_of_a_volume_is_counted_once_however_many_patches(balls: Path) -> None:
    for patches in (1, 5):
        splits = load_volumes(str(balls), patches=patches)
        assert splits.foreground_of is not None
        counts = [splits.foreground_of(index) for index in range(len(splits.train))]
        foreground = sum(there for _, there in counts)
        assert foreground == sum(int(numpy.load(path).sum()) for path in volume_masks(splits.train)), "as in the files"


def volume_masks(data: Any) -> list[Path]:
    return [pair.mask for pair in data._volumes.pairs]


# --- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".npy", ".npz", ".nii", ".nii.gz"])
def test_kinds_of_files_say_the_same(tmp_path: Path, ending: str) -> None:
    values = numpy.random.default_rng(0).normal(size=(4, 5, 6)).astype(numpy.float32)
    mask = (values > 0.5).astype(numpy.float64 if "nii" in ending else numpy.int16)
    pair = Pair("v", tmp_path / f"v{ending}", tmp_path / f"m{ending}")
    for path, array in ((pair.image, values), (pair.mask, mask)):
        save(path, array)
    found, numbers = read_pair(pair, MaskCode())
    assert (found == values).all()
    assert (numbers == (values > 0.5)).all()
    assert shape_of(pair.image) == (4, 5, 6)


def save(path: Path, array: Any) -> None:
    if path.suffix == ".npy":
        numpy.save(path, array)
    elif path.suffix == ".npz":
        numpy.savez(path, array)
    else:
        nibabel.save(nibabel.Nifti1Image(array, numpy.eye(4)), path)  # type: ignore[no-untyped-call]


def test_normalised_volume_has_mean_zero_and_deviation_one() -> None:
    values = numpy.random.default_rng(0).normal(1000, 30, (8, 9, 10)).astype(numpy.float32)
    found = normalised(values, None)
    assert (float(found.mean()), float(found.std())) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-5))
    clipped = normalised(values, (980.0, 1020.0))
    assert len(numpy.unique(clipped)) < len(numpy.unique(found))
    assert not normalised(numpy.full((2, 2, 2), 7.0, numpy.float32), None).any()


def spoil_with_nan(path: Path) -> None:
    values = numpy.load(path)
    values[1, 2, 3] = numpy.nan
    numpy.save(path, values)


def spoil(pair: Pair, kind: str) -> None:
    shape = numpy.load(pair.image).shape
    if kind == "nan":
        spoil_with_nan(pair.image)
    elif kind == "mask of another size":
        numpy.save(pair.mask, numpy.zeros((2, 2, 2), numpy.uint8))
    elif kind == "label outside":
        numpy.save(pair.mask, numpy.full(shape, 9, numpy.uint8))
    elif kind == "fractions in the mask":
        numpy.save(pair.mask, numpy.full(shape, 0.5))
    elif kind == "nan in the mask":
        numpy.save(pair.mask, numpy.full(shape, numpy.nan))
    elif kind == "truncated":
        pair.image.write_bytes(pair.image.read_bytes()[:500])
    elif kind == "two dimensions":
        numpy.save(pair.image, numpy.zeros((4, 4)))
    elif kind == "objects":
        numpy.save(pair.image, numpy.array([{"a": 1}]), allow_pickle=True)
    elif kind == "text":
        pair.image.write_text("no volume", encoding="utf-8")


BAD = [
    "nan",
    "mask of another size",
    "label outside",
    "fractions in the mask",
    "nan in the mask",
    "truncated",
    "two dimensions",
    "objects",
    "text",
]


@pytest.mark.parametrize("kind", BAD)
def test_bad_pair_is_named_when_it_is_asked_for_and_not_before(balls: Path, tmp_path: Path, kind: str) -> None:
    root = shutil.copytree(balls, tmp_path / "balls")
    splits = load_volumes(str(root), patch_size=16, patches=1, evaluation_fraction=0.5)
    evaluation: Any = splits.evaluation
    pair = evaluation._volumes.pairs[0]
    spoil(pair, kind)
    splits = load_volumes(str(root), patch_size=16, patches=1, evaluation_fraction=0.5)
    with pytest.raises(DataError, match=pair.name):
        splits.evaluation[0]
    splits.evaluation[1]


def test_truncated_nifti_is_named(tmp_path: Path) -> None:
    path = tmp_path / "v.nii.gz"
    save(path, numpy.random.default_rng(0).normal(size=(20, 20, 20)).astype(numpy.float32))
    whole = path.read_bytes()
    for cut in (10, 200, len(whole) // 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"v\.nii\.gz cannot be read as a volume"):
            read_volume(path)
    path.write_bytes(gzip.compress(b"nothing"))
    with pytest.raises(DataError, match=r"v\.nii\.gz cannot be read as a volume"):
        shape_of(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"patches": 0}, "patches is 0"),
        ({"foreground_share": 2}, "foreground_share is 2"),
        ({"window": [3, 1]}, "window is [3, 1]"),
        ({"patch_size": [4, 4]}, "patch_size is [4, 4]"),
        ({"kept_volumes": -1}, "kept_volumes is -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(balls: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as error:
        load_volumes(str(balls), **options)
    assert said in error.value.value


def test_task_reads_a_whole_volume_and_shows_its_middle(balls: Path) -> None:
    splits = load_volumes(str(balls))
    task = volumes_task(splits.classes)
    path = balls / "images" / "003.npy"
    shape = numpy.load(path).shape
    inputs = task.read(path)
    assert inputs.shape == (1, *shape)
    outputs = torch.full((1, *shape), -1.0)
    outputs[:, : shape[0] // 2] = 1.0
    [answer] = task.tell(outputs)["areas"]
    assert answer == {"class": "foreground", "share": (shape[0] // 2) / shape[0]}
    assert task.picture is not None
    picture = task.picture(path, outputs)
    assert isinstance(picture, Image.Image)
    assert picture.size == (shape[2], shape[1])
