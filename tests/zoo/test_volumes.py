"""Recipe `volumes` on generated arrays."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.mask_data import logged, make_volumes
from helpers.system import events, here, weights
from samestep.errors import EXIT_DONE, DataError, InputError
from samestep.zoo.masks import IGNORED, MaskCode, Pair
from samestep.zoo.volumes import (
    PatchOptions,
    RandomPatches,
    Tiles,
    Volumes,
    load_volumes,
    normalize,
    read_pair,
    tile_axis,
    volumes_task,
)

SMALL = (
    "data.options.patch_size=[6, 8, 8]",
    "data.options.patches=2",
    "model.options.width=4",
    "model.options.levels=2",
    "batch_size=7",
    "microbatches=4",
    "step.reduction=exact",
    "epochs=1",
)


@pytest.fixture(scope="module")
def balls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_volumes(tmp_path_factory.mktemp("balls") / "balls", 10)


def train(data: Path, place: Path, name: str, processes: int, *overrides: str) -> Path:
    chosen = ("--name", name, "--processes", processes, "--workers", 0)
    options = ("volumes", f"data.options.path={data}", *SMALL, *overrides)
    assert here("train", *chosen, *options, cwd=place) == EXIT_DONE
    return place / "runs" / name


# --- training --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_are_equal_on_one_and_three_processes(balls: Path, tmp_path: Path) -> None:
    one, three = (train(balls, tmp_path, f"on-{processes}", processes) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert logged(one) == logged(three)
    [evaluation] = events(one, "evaluation")
    assert {"loss_pixel", "loss_dice", "dice", "iou"} <= evaluation.keys()
    assert evaluation["samples"] == len(load_volumes(str(balls), patch_size=[6, 8, 8]).evaluation)


@pytest.mark.slow
def test_bad_volumes_are_skipped(balls: Path, tmp_path: Path) -> None:
    root = shutil.copytree(balls, tmp_path / "balls")
    splits = load_volumes(str(root))
    trained: Any = splits.train
    spoil_with_nan(trained._volumes.pairs[1].image)
    overrides = ("data.bad_samples=skip",)
    one, three = (train(root, tmp_path, f"on-{processes}", processes, *overrides) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert logged(one) == logged(three)
    [skipped] = events(one, "skipped")
    assert (skipped["split"], skipped["count"]) == ("training", 2)  # both of its patches
    assert "1 values that are not finite" in skipped["samples"][0]


# --- patches ---------------------------------------------------------------------------------------------


@given(length=st.integers(1, 200), side=st.integers(1, 60))
def test_tiles_cover_an_axis_once(length: int, side: int) -> None:
    covered = []
    for start, fresh in tile_axis(length, side):
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
    """Every value of a mask is a target once, for every patch size."""
    folder = tmp_path_factory.getbasetemp()
    pair = Pair("v", folder / "v.npy", folder / "m.npy")
    numbers = numpy.arange(numpy.prod(shape)).reshape(shape)
    numpy.save(pair.image, numbers.astype(numpy.float32))
    numpy.save(pair.mask, numbers)
    code = MaskCode([f"class {number}" for number in range(max(2, numbers.size))])
    tiles = Tiles(Volumes([pair], code, None), size)
    results = []
    for index in range(len(tiles)):
        patch, target = tiles[index]
        assert patch.shape == (1, *size)
        counted = target != IGNORED
        results += target[counted].tolist()
        values = torch.from_numpy(normalize(numbers.astype(numpy.float32), None)).flatten()
        assert torch.equal(patch[0][counted], values[target[counted]]), "counted voxels are the visible ones"
    assert sorted(results) == list(range(numbers.size))


@pytest.mark.parametrize(("share", "least"), [(1.0, 100), (0.0, 0)])
def test_share_of_patches_with_foreground(tmp_path: Path, share: float, least: int) -> None:
    """The volume has one foreground voxel."""
    mask = numpy.zeros((20, 30, 40), numpy.uint8)
    mask[2, 29, 17] = 1
    pair = Pair("v", tmp_path / "v.npy", tmp_path / "m.npy")
    numpy.save(pair.image, mask.astype(numpy.float32))
    numpy.save(pair.mask, mask)
    patches = RandomPatches(Volumes([pair], MaskCode(), None), PatchOptions(4, 100, share))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hits = sum(bool((patches[index][1] == 1).any()) for index in range(100))
    assert least <= hits <= max(5, least)


# --- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".npy", ".nii", ".nii.gz"])
def test_file_formats_give_equal_values(tmp_path: Path, ending: str) -> None:
    values = numpy.random.default_rng(0).normal(size=(4, 5, 6)).astype(numpy.float32)
    mask = (values > 0.5).astype(numpy.float64 if "nii" in ending else numpy.int16)
    pair = Pair("v", tmp_path / f"v{ending}", tmp_path / f"m{ending}")
    for path, array in ((pair.image, values), (pair.mask, mask)):
        save(path, array)
    results, numbers = read_pair(pair, MaskCode())
    assert (results == values).all()
    assert (numbers == (values > 0.5)).all()


def save(path: Path, array: Any) -> None:
    if path.suffix == ".npy":
        numpy.save(path, array)
    else:
        nibabel.save(nibabel.Nifti1Image(array, numpy.eye(4)), path)  # type: ignore[no-untyped-call]


def test_normalized_volume_has_mean_0_and_deviation_1() -> None:
    values = numpy.random.default_rng(0).normal(1000, 30, (8, 9, 10)).astype(numpy.float32)
    results = normalize(values, None)
    assert (float(results.mean()), float(results.std())) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-5))
    clipped = normalize(values, (980.0, 1020.0))
    assert len(numpy.unique(clipped)) < len(numpy.unique(results))
    assert not normalize(numpy.full((2, 2, 2), 7.0, numpy.float32), None).any()


def spoil_with_nan(path: Path) -> None:
    values = numpy.load(path)
    values[1, 2, 3] = numpy.nan
    numpy.save(path, values)


def replace_mask(pair: Pair, value: Any) -> None:
    numpy.save(pair.mask, numpy.full(numpy.load(pair.image).shape, value))


BAD: dict[str, Callable[[Pair], Any]] = {
    "nan": lambda pair: spoil_with_nan(pair.image),
    "mask of another size": lambda pair: numpy.save(pair.mask, numpy.zeros((2, 2, 2), numpy.uint8)),
    "label outside": lambda pair: replace_mask(pair, numpy.uint8(9)),
    "fractions in the mask": lambda pair: replace_mask(pair, 0.5),
    "nan in the mask": lambda pair: replace_mask(pair, numpy.nan),
    "truncated": lambda pair: pair.image.write_bytes(pair.image.read_bytes()[:500]),
    "two dimensions": lambda pair: numpy.save(pair.image, numpy.zeros((4, 4))),
    "objects": lambda pair: numpy.save(pair.image, numpy.array([{"a": 1}]), allow_pickle=True),
    "text": lambda pair: pair.image.write_text("no volume", encoding="utf-8"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_pair_is_reported_on_access(balls: Path, tmp_path: Path, kind: str) -> None:
    root = shutil.copytree(balls, tmp_path / "balls")
    splits = load_volumes(str(root), patch_size=16, patches=1, evaluation_fraction=0.5)
    evaluation: Any = splits.evaluation
    pair = evaluation._volumes.pairs[0]
    BAD[kind](pair)
    splits = load_volumes(str(root), patch_size=16, patches=1, evaluation_fraction=0.5)
    with pytest.raises(DataError, match=pair.name):
        splits.evaluation[0]
    splits.evaluation[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patches": 0}, "patches is 0"),
        ({"foreground_share": 2}, "foreground_share is 2"),
        ({"window": [3, 1]}, "window is not a minimum and a maximum"),
        ({"window": ["a", "b"]}, "window is 'a'"),
        ({"window": 5}, "window is 5"),
        ({"patch_size": [4, 4]}, "options.patch_size"),
        ({"patches": 2.5}, "patches is 2.5"),
        ({"patch_size": True}, "patch_size is True"),
        ({"flips": "none"}, "flips is 'none'"),
    ],
)
def test_invalid_options_are_refused(balls: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        load_volumes(str(balls), **options)
    assert message in error.value.value


def test_task_segments_a_volume(balls: Path) -> None:
    splits = load_volumes(str(balls))
    task = volumes_task(splits.classes)
    path = balls / "images" / "003.npy"
    shape = numpy.load(path).shape
    inputs = task.read(path)
    assert inputs.shape == (1, *shape)
    outputs = torch.full((1, *shape), -1.0)
    outputs[:, : shape[0] // 2] = 1.0
    [answer] = task.describe(outputs)["areas"]
    assert answer == {"class": "foreground", "share": (shape[0] // 2) / shape[0]}
    assert task.picture is not None
    picture = task.picture(path, outputs)
    assert isinstance(picture, Image.Image)
    assert picture.size == (shape[2], shape[1])
