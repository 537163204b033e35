"""Versions of Python, torch and what belongs to it, and whether they fit one another."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from samestep.tools.doctor.finding import Finding, fails, informs, passes, warns
from samestep.tools.doctor.nvidia import Nvidia

NEEDED = ("samestep", "torch", "torchvision", "torchmetrics", "numpy", "safetensors", "tensorboard", "scikit-learn")
# What recipes can name besides: `pip install 'samestep[zoo]'`.
EXTRAS = ("timm", "transformers", "segmentation-models-pytorch", "datasets", "pyarrow", "nibabel", "onnx", "onnxscript")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
# The first driver that runs programs of this CUDA (NVIDIA CUDA Toolkit release notes, "minor version compatibility").
_FIRST_DRIVER = {11: Version("450.80.02"), 12: Version("525.60.13"), 13: Version("580.65.06")}
_IS = re.compile(r"^(\w+)(?:: [^=]+)? = '([^']+)'", re.MULTILINE)


@dataclass(frozen=True)
class Conflict:
    """What a package asks for and does not get.

    Attributes:
        found: the version that is installed instead; None for none.
    """

    package: str
    version: str
    wants: str
    found: str | None


@dataclass(frozen=True)
class Versions:
    """What is installed.

    Attributes:
        installed: packages that are there, of those that matter.
        conflicts: what they ask for and do not get.
        cuda: of which torch was built; None for a build without.
        hip: of which torch was built, for GPUs of AMD's; None for a build without.
        vision_build: what torchvision was built for, such as `cpu` or `cu130`; None where it does not say.
        nccl: the package of NCCL that torch brings.
    """

    python: str
    installed: dict[str, str]
    conflicts: tuple[Conflict, ...] = ()
    cuda: str | None = None
    hip: str | None = None
    vision_build: str | None = None
    nccl: str | None = None


def read_versions() -> Versions:
    """What is installed for this Python; nothing of it is imported."""
    installed = {name: found for name in (*NEEDED, *EXTRAS) if (found := _version(name)) is not None}
    torch, vision = _built("torch"), _built("torchvision")
    return Versions(
        python=platform.python_version(),
        installed=installed,
        conflicts=tuple(conflict for name in installed for conflict in _conflicts(name)),
        cuda=torch.get("cuda"),
        hip=torch.get("hip"),
        vision_build=vision.get("__version__", "").partition("+")[2] or None,
        nccl=next((found for name in _NCCL if (found := _version(name)) is not None), None),
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _conflicts(name: str) -> Iterator[Conflict]:
    own = distribution(name)
    for text in own.requires or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _version(wanted.name)
        try:
            fits = found is not None and wanted.specifier.contains(found, prereleases=True)
        except InvalidVersion:
            continue  # one's own numbering; nobody can say
        if not fits:
            yield Conflict(name, own.version, f"{wanted.name}{wanted.specifier}", found)


def _built(package: str) -> dict[str, str]:
    """What a package's `version.py` says of its build, read as text: importing takes seconds, or fails."""
    spec = find_spec(package)
    path = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    return dict(_IS.findall(path.read_text(encoding="utf-8"))) if path is not None and path.is_file() else {}


def check_packages(versions: Versions) -> Iterator[Finding]:
    """Whether everything is there, and each has what it asks for."""
    yield passes("Python", versions.python)
    missing = [name for name in NEEDED if name not in versions.installed]
    if missing:
        yield fails(
            "packages",
            f"{', '.join(missing)}: not installed",
            rule="Samestep uses them",
            do="pip install samestep, in the environment that this Python belongs to",
        )
    else:
        shown = ", ".join(f"{name} {versions.installed[name]}" for name in NEEDED)
        yield passes("packages", shown)
    yield from _check_conflicts(versions.conflicts)
    absent = [name for name in EXTRAS if name not in versions.installed]
    if absent:
        yield informs("extras", f"{', '.join(absent)}: not installed; recipes that name them say so (samestep[zoo])")
    else:
        yield informs("extras", "all of samestep[zoo]")


def _check_conflicts(conflicts: Sequence[Conflict]) -> Iterator[Finding]:
    for conflict in conflicts:
        found = f"{conflict.found} is installed" if conflict.found is not None else "it is not installed"
        value = f"{conflict.package} {conflict.version} wants {conflict.wants}, but {found}"
        if conflict.wants.startswith("torch=="):
            yield fails(
                f"{conflict.package} and torch",
                value,
                rule="its compiled operators are built for one version of torch, and do not load beside another",
                do=f"pip install --upgrade torch {conflict.package}, both in one command, from one index",
            )
        else:
            # What Samestep asks for it uses itself; what others ask for may never be used.
            judge = fails if conflict.package == "samestep" else warns
            yield judge(
                f"what {conflict.package} asks for",
                value,
                rule="a package has the versions that it was made for",
                do=f"pip install '{conflict.wants}', and see what `pip check` says then",
            )
    if not conflicts:
        yield passes("versions together", "each package has what it asks for")


def check_builds(versions: Versions, nvidia: Nvidia) -> Iterator[Finding]:
    """Whether torch, CUDA, the driver and torchvision are built for one another."""
    if versions.hip is not None:
        yield informs("torch's build", f"ROCm {versions.hip}; nothing here has been tried with it")
    elif versions.cuda is None:
        yield _check_cpu_build(nvidia)
    elif nvidia.driver is None:
        yield informs("torch's build", f"CUDA {versions.cuda}; there is no NVIDIA driver, so ranks compute on the CPU")
    else:
        yield _check_driver(versions.cuda, nvidia.driver)
    torch, vision = _digits(versions.cuda), versions.vision_build
    if vision is None or not vision.startswith(("cpu", "cu")):
        return
    if vision == (f"cu{torch}" if torch else "cpu"):
        yield passes("torchvision's build", vision)
    elif not torch:
        yield informs("torchvision's build", f"{vision}, beside a CPU build of torch: without nms and image codecs")
    else:
        yield warns(
            "torchvision's build",
            f"{vision}, beside torch for CUDA {versions.cuda}",
            rule="both are built for one CUDA; its compiled operators do not load otherwise",
            do="install both in one command from one index: pip install --force-reinstall torch torchvision",
        )


def _digits(cuda: str | None) -> str:
    return (cuda or "").replace(".", "")


def _check_cpu_build(nvidia: Nvidia) -> Finding:
    if nvidia.driver is None:
        return passes("torch's build", "for the CPU, and there is no NVIDIA driver")
    return fails(
        "torch's build",
        f"for the CPU, though there is an NVIDIA driver, {nvidia.driver}",
        rule="torch finds GPUs only where it was built for CUDA",
        do="pip install --force-reinstall torch torchvision, without +cpu, from the default index",
    )


def _check_driver(cuda: str, driver: str) -> Finding:
    name, value = "CUDA and driver", f"torch is built for CUDA {cuda}, the driver is {driver}"
    try:
        first = _FIRST_DRIVER.get(Version(cuda).major)
        if first is None or Version(driver) >= first:
            return passes(name, value)
    except InvalidVersion:
        return informs(name, value)
    return fails(
        name,
        value,
        rule=f"CUDA {Version(cuda).major} wants driver {first} or later",
        do="update the driver, or install a torch that was built for an older CUDA",
    )


def check_nccl(versions: Versions, loaded: str | None) -> Iterator[Finding]:
    """Whether the NCCL that a rank loaded is the one that torch brings.

    Args:
        loaded: its version; None where torch was built without, or nobody asked.
    """
    if loaded is None:
        return
    if versions.nccl is None or Version(versions.nccl).release[:3] == Version(loaded).release[:3]:
        yield passes("NCCL", loaded)
        return
    yield warns(
        "NCCL",
        f"{loaded} is loaded, {versions.nccl} is installed beside torch",
        rule="torch runs with the NCCL that it was built with",
        do="look for another libnccl in LD_LIBRARY_PATH or LD_PRELOAD, and unset these",
    )
