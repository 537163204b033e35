"""Hashes of the user's modules."""

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from samestep.errors import InputError
from samestep.launcher.source_files import SourceFiles

OLD, NEW = "VALUE = 1\n", "VALUE = 2\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_package").mkdir()
    for name in ("__init__", "used", "late"):
        (tmp_path / "my_package" / f"{name}.py").write_text(OLD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def write(project: Path, name: str) -> None:
    (project / "my_package" / f"{name}.py").write_text(NEW, encoding="utf-8")


def test_only_modules_of_the_user_are_hashed(project: Path) -> None:
    importlib.import_module("my_package.used")
    files = SourceFiles()
    files.note_imports()
    assert files.hashes["my_package.used"] == hashlib.sha256(OLD.encode()).hexdigest()
    assert "my_package.late" not in files.hashes
    libraries = {json, torch, pytest, sys.modules["samestep"]}
    assert not {module.__name__ for module in libraries} & {name.partition(".")[0] for name in files.hashes}


def test_changed_modules_are_refused_or_accepted(project: Path) -> None:
    importlib.import_module("my_package.used")
    recorded = {"my_package.used": hashlib.sha256(OLD.encode()).hexdigest(), "of.another.machine": "0" * 64}
    assert SourceFiles().require(recorded) == []
    write(project, "used")
    files = SourceFiles()
    with pytest.raises(InputError, match=r"my_package\.used") as raised:
        files.require(recorded)
    assert raised.value.code == "E_CODE_CHANGED"
    assert files.require(recorded, accept_changes=True) == ["my_package.used"]
    assert files.hashes["my_package.used"] == hashlib.sha256(NEW.encode()).hexdigest()


def test_a_module_that_is_not_imported_yet_is_compared(project: Path) -> None:
    recorded = {"my_package.late": hashlib.sha256(OLD.encode()).hexdigest()}
    files = SourceFiles()
    assert files.require(recorded) == []
    assert "my_package.late" not in sys.modules, "the comparison imported the user's code"
    write(project, "late")
    with pytest.raises(InputError):
        SourceFiles().require(recorded)
    importlib.import_module("my_package.late")
    with pytest.raises(InputError, match=r"my_package\.late"):
        files.note_imports()


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "a/b", "a\0b", "x" * 10_000])
def test_a_recorded_name_can_be_any_text(name: str) -> None:
    assert SourceFiles().require({name: "0" * 64}) == []
