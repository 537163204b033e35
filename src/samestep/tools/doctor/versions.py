"""Checks of installed versions and builds: Python, packages, torch, CUDA, driver."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from samestep.tools.doctor.findings import Finding, Verdict, judged
from samestep.tools.doctor.gpus import Nvidia

_REQUIRED = ("samestep", "torch", "numpy", "safetensors", "pydantic", "rich", "psutil")
# Packages by extra.
_OPTIONAL = {
    "recipes": ("torchvision", "tensorboard", "pyyaml", "pillow", "jinja2"),
    "zoo": (
        *("timm", "transformers", "segmentation-models-pytorch", "datasets"),
        *("pyarrow", "nibabel", "onnx", "onnxscript"),
    ),
}
# First driver for each CUDA version (NVIDIA CUDA Toolkit release notes, "minor version compatibility").
_FIRST_DRIVER = {11: Version("450.80.02"), 12: Version("525.60.13"), 13: Version("580.65.06")}
_ASSIGNMENT = re.compile(r"^(\w+)(?:: [^=]+)? = '([^']+)'", re.MULTILINE)
_REINSTALL = "pip install --force-reinstall torch torchvision"


@dataclass(frozen=True)
class Versions:
    """Installed versions."""

    python: str
    installed: dict[str, str]  # versions of required and optional packages
    conflicts: tuple[Finding, ...] = ()  # unsatisfied requirements
    cuda: str | None = None  # CUDA version of the torch build; None for another build
    hip: str | None = None  # ROCm version of the torch build; None for another build


def read_versions() -> Versions:
    """Read the versions from metadata, without importing the packages."""
    versions = {name: _version(name) for name in (*_REQUIRED, *chain(*_OPTIONAL.values()))}
    installed = {name: value for name, value in versions.items() if value is not None}
    conflicts = tuple(conflict for name in installed for conflict in _conflicts(name))
    build = _torch_build()
    return Versions(platform.python_version(), installed, conflicts, build.get("cuda"), build.get("hip"))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _conflicts(name: str) -> Iterator[Finding]:
    package = distribution(name)
    for requirement in map(Requirement, package.requires or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        try:
            is_met = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        except InvalidVersion:
            continue  # a version outside PEP 440 cannot be compared
        if not is_met:
            yield conflict_finding(f"{name} {package.version}", f"{requirement.name}{requirement.specifier}", installed)


def _torch_build() -> dict[str, str]:
    """Return the assignments in torch's `version.py`; read as text, since an import takes seconds or fails."""
    spec = find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    return dict(_ASSIGNMENT.findall(path.read_text(encoding="utf-8"))) if path is not None and path.is_file() else {}


def check_packages(versions: Versions) -> Iterator[Finding]:
    """Check that required packages are installed and that their requirements are met."""
    installed = versions.installed
    yield Finding("Python", "pass", versions.python)
    missing = [name for name in _REQUIRED if name not in installed]
    present = ", ".join(f"{name} {installed[name]}" for name in _REQUIRED if name in installed)
    yield judged(
        "packages",
        "fail" if missing else "pass",
        f"not installed: {', '.join(missing)}" if missing else present,
        "all dependencies of Samestep",
        "pip install samestep, in the environment of this Python",
    )
    for extra, names in _OPTIONAL.items():
        absent = ", ".join(name for name in names if name not in installed)
        value = f"not installed: {absent}" if absent else "all packages installed"
        yield Finding(f"samestep[{extra}]", "info", value)
    yield from versions.conflicts
    if not versions.conflicts:
        yield Finding("requirements", "pass", "the requirements of all packages are met")


def conflict_finding(package: str, requirement: str, installed: str | None) -> Finding:
    """Return the finding for an unsatisfied requirement of a package, given with its version."""
    value, name = (
        f"{package} requires {requirement}; {installed or 'nothing'} is installed",
        package.split(maxsplit=1)[0],
    )
    if requirement.startswith("torch=="):
        expected = "compiled operators load only with the torch version of their build"
        fix = f"pip install --upgrade torch {name}, in one command, from one index"
        return Finding(f"{name} and torch", "fail", value, expected, fix)
    # Samestep uses all of its own requirements; those of other packages may never be used.
    verdict: Verdict = "fail" if name == "samestep" else "warn"
    fix = f"pip install '{requirement}', then pip check"
    return Finding(f"requirements of {name}", verdict, value, "the required version", fix)


def check_builds(versions: Versions, nvidia: Nvidia) -> Iterator[Finding]:
    """Check that torch, CUDA and the driver match."""
    name, cuda, driver = "torch build", versions.cuda, nvidia.driver
    if versions.hip is not None:
        yield Finding(name, "info", f"ROCm {versions.hip}; not tested with Samestep")
    elif cuda is None:
        yield judged(
            name,
            "pass" if driver is None else "fail",
            "CPU; no NVIDIA driver" if driver is None else f"CPU, with NVIDIA driver {driver}",
            "a CUDA build of torch for GPUs",
            f"{_REINSTALL}, without +cpu, from the default index",
        )
    elif driver is None:
        yield Finding(name, "info", f"CUDA {cuda}; no NVIDIA driver, so ranks compute on the CPU")
    else:
        yield _check_driver(cuda, driver)


def _check_driver(cuda: str, driver: str) -> Finding:
    major = int(cuda.partition(".")[0])
    first = _FIRST_DRIVER.get(major)
    return judged(
        "CUDA and driver",
        "pass" if first is None or Version(driver) >= first else "fail",
        f"torch for CUDA {cuda}, driver {driver}",
        f"driver {first} or later for CUDA {major}",
        "update the driver, or install torch for an older CUDA",
    )
