"""Checks of installed packages, the build of torch, and environment variables."""

from __future__ import annotations

import platform
import re
import runpy
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from samestep.distributed.env import SHARE_GPU
from samestep.tools.doctor.findings import Finding, judged

_PACKAGES = ("samestep", "torch", "numpy", "torchvision", "safetensors", "transformers", "timm")
_ON = "(?i)1|true|yes|on"
# Variables that change results or speed: values, as a regular expression, and effect.
_EFFECTS = {
    "CUDA_LAUNCH_BLOCKING": (_ON, "much slower; for debugging"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON, "much slower; for debugging"),
    "TORCH_DISTRIBUTED_DEBUG": ("(?i)detail", "much slower; for debugging"),
    "NCCL_P2P_DISABLE": (_ON, "slower transfers between GPUs"),
    "NCCL_SHM_DISABLE": (_ON, "slower transfers between GPUs"),
    "NCCL_IB_DISABLE": (_ON, "sockets instead of InfiniBand"),
    "NVIDIA_TF32_OVERRIDE": (".+", "results change, whatever the recipe says"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (_ON, "results change, whatever the recipe says"),
    "CUBLAS_WORKSPACE_CONFIG": ("(?!:4096:8$|:16:8$).*", "cuBLAS is not deterministic"),
    SHARE_GPU: (
        "nccl",
        "ranks that share a GPU send messages through sockets of NCCL: times of messages mean nothing",
    ),
    "OMP_PROC_BIND": (
        "(?i)true|close|master|primary|spread",
        "ranks may share the processors of their threads",
    ),
    "GOMP_CPU_AFFINITY": (".+", "ranks may share the processors of their threads"),
}


def check_packages() -> Iterator[Finding]:
    """Check the requirements of the installed packages that runs use."""
    yield Finding("Python", "pass", platform.python_version())
    versions = {
        name: installed for name in _PACKAGES if (installed := installed_version(name)) is not None
    }
    yield Finding(
        "packages", "pass", ", ".join(f"{name} {installed}" for name, installed in versions.items())
    )
    conflicts = [conflict for name in versions for conflict in _conflicts(name)]
    yield from conflicts
    if not conflicts:
        yield Finding("requirements", "pass", "the requirements of all packages are met")


def installed_version(name: str) -> str | None:
    """Return the installed version of a package, from its metadata, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _conflicts(package: str) -> Iterator[Finding]:
    for requirement in map(Requirement, requires(package) or ()):
        installed = installed_version(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if installed is not None and requirement.specifier.contains(installed, prereleases=True):
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        # Samestep uses all of its own requirements, and compiled operators load only with the torch
        # of their build; other requirements may never be used.
        is_needed = package == "samestep" or needed.startswith("torch==")
        yield Finding(
            f"requirements of {package}",
            "fail" if is_needed else "warn",
            f"{package} {version(package)} requires {needed}; {installed or 'nothing'} is installed",
            "the required version",
            f"pip install --upgrade {package} '{needed}', in one command, from one index",
        )


def read_torch_build() -> Mapping[str, Any]:
    """Return the variables of torch's `version.py`, such as `cuda`; an import of torch takes seconds or fails."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def check_torch_build(build: Mapping[str, Any], driver: str | None) -> Finding:
    """Check that torch is built for the GPUs of the machine; `build` is the result of `read_torch_build`."""
    cuda = build.get("cuda")
    hip = build.get("hip")
    return judged(
        "torch build",
        "fail" if driver is not None and cuda is None and hip is None else "pass",
        f"CUDA {cuda}, ROCm {hip}, NVIDIA driver {driver}",
        "a CUDA build of torch for GPUs",
        "pip install --force-reinstall torch torchvision, without +cpu, from the default index",
    )


def check_variables(variables: Mapping[str, str], processors: int) -> Iterator[Finding]:
    """Check for variables that change results or speed, and for more threads than processors."""
    findings = []
    for name, (pattern, effect) in _EFFECTS.items():
        value = variables.get(name)
        if value is not None and re.fullmatch(pattern, value.strip()):
            findings.append(
                Finding(
                    name, "warn", f"{value}: {effect}", "unset, unless intended", f"unset {name}"
                )
            )
    name = "OMP_NUM_THREADS"
    number = variables.get(name, "1").split(",")[0].strip()  # one number per nesting level
    if not number.isdecimal() or not 1 <= int(number) <= processors:
        expected = f"a number between 1 and {processors}, since every rank starts as many; torch uses step.threads"
        findings.append(
            Finding(name, "warn", variables[name], expected, f"export {name}=1, or unset {name}")
        )
    yield from findings or [
        Finding("environment variables", "pass", "none changes results or speed")
    ]
