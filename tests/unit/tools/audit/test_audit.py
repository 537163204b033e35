"""The `.pth` file of an audit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.errors import InputError
from samestep.tools.audit.audit import install_hooks

PROGRAM = "import site, sys; before = set(sys.modules); site.addsitedir(sys.argv[1]); site.addsitedir(sys.argv[1]);"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    install_hooks(folder)
    return folder


def run(code: str, packages: Path, audit: Path | None) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "SAMESTEP_AUDIT"}
    if audit is not None:
        variables["SAMESTEP_AUDIT"] = str(audit)
    # -S: without the file that an earlier audit may have left in the folder of packages
    command = [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}; {PROGRAM} {code}", str(packages)]
    subprocess.run(command, env=variables, check=True, timeout=60)


def test_file_has_no_effect_without_the_variable(packages: Path) -> None:
    run("assert not any(name.startswith('samestep') for name in sys.modules)", packages, None)


def test_hooks_are_installed_once_and_import_nothing_large(packages: Path, tmp_path: Path) -> None:
    code = (
        "assert [type(f).__name__ for f in sys.meta_path].count('_TorchFinder') == 1; "
        "assert not {'torch', 'typing', 'pathlib', 'numpy'} & (set(sys.modules) - before)"
    )
    run(code, packages, tmp_path)


@pytest.mark.slow
def test_search_for_torch_before_its_import(packages: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.util import find_spec; assert find_spec('torch') and find_spec('torch'); import torch; "
        "assert torch.nn.functional.dropout.__module__.startswith('samestep'); "
        "assert not any('_Torch' in repr(f) for f in sys.meta_path)"
    )
    run(code, packages, tmp_path)


def test_file_prints_nothing_without_the_package_or_the_folder(packages: Path, tmp_path: Path) -> None:
    """The file stays after an audit: in another version of the environment, or for another user."""
    for paths in ("[]", repr(sys.path)):
        code = f"import sys; sys.path += {paths}; import site; site.addsitedir(sys.argv[1])"
        command = [sys.executable, "-S", "-I", "-c", code, str(packages)]
        variables = {**os.environ, "SAMESTEP_AUDIT": str(tmp_path / "removed")}
        done = subprocess.run(command, env=variables, check=True, timeout=60, capture_output=True)
        assert (done.stdout, done.stderr) == (b"", b"")


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        install_hooks(tmp_path / "missing")
    assert caught.value.code == "E_OUTPUT"
