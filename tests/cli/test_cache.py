"""`samestep cache`: list and removal."""

from pathlib import Path

import pytest

from helpers.system import answer, here
from samestep.zoo.cache.sample_cache import SampleCache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMESTEP_CACHE", str(tmp_path / "caches"))
    for name, kind in (("photos-1", "decoded"), ("photos-2", "encoded")):
        cache = SampleCache(tmp_path / "caches" / name, {"kind": kind, "source": "/photos"}, limit=None, samples=9)
        for number in range(3):
            cache.add((number, number), memoryview(bytes(1000)))
    return tmp_path / "caches"


def test_list(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("cache", "--json", cwd=tmp_path) == 0
    listed = answer(capsys)
    rows = [(cache["name"], cache["kind"], cache["entries"], cache["source"]) for cache in listed["caches"]]
    assert rows == [("photos-1", "decoded", 3, "/photos"), ("photos-2", "encoded", 3, "/photos")]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert listed["bytes"] == sum(path.stat().st_size for path in files)
    assert here("cache", cwd=tmp_path) == 0
    assert "photos-2" in capsys.readouterr().out


def test_damaged_description_is_listed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "photos-1/cache.json").write_text("[", encoding="utf-8")
    assert here("cache", "--json", cwd=tmp_path) == 0
    assert [cache["kind"] for cache in answer(capsys)["caches"]] == ["unknown", "encoded"]


def test_clear_one(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("cache", "--clear", "photos-1", "--json", cwd=tmp_path) == 0
    assert [cache["name"] for cache in answer(capsys)["removed"]] == ["photos-1"]
    assert [path.name for path in folder.iterdir()] == ["photos-2"]


def test_clear_all(folder: Path, tmp_path: Path) -> None:
    assert here("cache", "--clear", cwd=tmp_path) == 0
    assert not list(folder.iterdir())
    assert here("cache", "--clear", cwd=tmp_path) == 0


@pytest.mark.parametrize("name", ["photos", "../caches/photos-1", ".", "/"])
def test_unknown_name(name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("cache", "--clear", name, cwd=tmp_path) == 2
    assert "E_UNKNOWN_NAME" in capsys.readouterr().err
    assert len(list(folder.iterdir())) == 2


def test_data_without_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("train", "digits", "--set", "data.cache=decoded", cwd=tmp_path) == 2
    assert "data 'digits' has no cache" in capsys.readouterr().err


def test_limit_of_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("train", "images", "--set", "data.cache_gb=0", "data.options.path=a", cwd=tmp_path) == 2
    assert "data.cache_gb" in capsys.readouterr().err
