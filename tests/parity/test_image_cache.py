"""A run has the same bits with and without a cache, on any number of processes and loader workers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from helpers.photos import SMALL, make_unreadable, write_photos
from helpers.system import events, here, weights
from samestep.zoo.sample_cache import CacheInfo, list_caches


def outcome(root: Path, name: str, cache: str, processes: int, workers: int, *options: str) -> dict[str, Any]:
    """Train, and return the results that must not depend on the cache."""
    settings = (*SMALL, "data.options.path=photos", f"data.cache={cache}", *options)
    machine = ("--processes", processes, "--workers", workers)
    assert here("train", "images", "--exact", "--name", name, *machine, *settings, cwd=root) == 0
    run = root / "runs" / name
    losses = [(event["loss"], event["grad_norm"]) for event in events(run, "step")]
    assert len(losses) == 8
    return {"weights": weights(run), "losses": losses, "evaluation": [e["loss"] for e in events(run, "evaluation")]}


def caches(root: Path) -> list[CacheInfo]:
    return [cache for cache in list_caches() if cache.source.startswith(str(root))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_photos(tmp_path / "photos", 30)
    return tmp_path


@pytest.mark.slow
def test_decoded_cache(root: Path) -> None:
    plain = outcome(root, "plain", "none", 1, 0)
    assert not caches(root)
    assert outcome(root, "built", "decoded", 2, 2) == plain
    [built] = caches(root)
    assert (built.kind, built.bytes > 30 * 60 * 80 * 3) == ("decoded", True)
    make_unreadable(root / "photos")
    assert outcome(root, "used", "decoded", 3, 0) == plain
    assert caches(root) == [built]
    [announcement] = [event["text"] for event in events(root / "runs/used", "cache")]
    assert "already there: " in announcement


@pytest.mark.long
@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2), (3, 0), (3, 2)])
def test_all_numbers_of_processes_and_workers(processes: int, workers: int, root: Path) -> None:
    plain = outcome(root, "plain", "none", 1, 0)
    assert outcome(root, "built", "decoded", processes, workers) == plain
    make_unreadable(root / "photos")
    assert outcome(root, "used", "decoded", processes, workers) == plain


@pytest.mark.long
def test_segmentation(root: Path) -> None:
    shutil.copytree(root / "photos/a", root / "pairs/images")
    (root / "pairs/masks").mkdir()
    for path in (root / "pairs/images").iterdir():
        with Image.open(path) as image:
            image.convert("L").point(lambda value: 255 * (value >= 100)).save(root / "pairs/masks" / f"{path.stem}.png")

    def train(name: str, cache: str, processes: int) -> tuple[str, str]:
        settings = ("data.options.path=pairs", f"data.cache={cache}", "data.options.image_size=32", "epochs=1")
        small = ("model.name=unet_small", "batch_size=4", "microbatches=2")
        machine = ("--processes", processes, "--workers", 1)
        assert here("train", "segmentation", "--exact", "--name", name, *machine, *settings, *small, cwd=root) == 0
        return weights(root / "runs" / name)

    plain = train("plain", "none", 1)
    assert train("built", "decoded", 2) == plain
    make_unreadable(root / "pairs/images")
    assert train("used", "decoded", 1) == plain
