r"""Collect the wheels for `gpu.py` on a machine without a network, within 60 MB.

The wheels are those of the package's dependencies, of the extras `recipes` and `gpu`, of the build backend and of the
tests, without the large packages that such a machine has: torch, torchvision, numpy and pillow. On that machine:

    python3 -m pip install --no-index --find-links wheels -e '.[recipes,gpu]' \
        pytest pytest-timeout pytest-xdist hypothesis
"""

from __future__ import annotations

import argparse
import email
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# Small packages that came with torch are collected too: other packages may need newer versions of them.
PRESENT = ("torch", "torchvision", "numpy", "pillow")
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
MEGABYTES = 60
PIP = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
EXTRAS = ("recipes", "gpu")
# Versions of manylinux that pip matches one by one; the newest of them runs on systems from 2021 on.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]


def required() -> list[Requirement]:
    """Return the requirements of the package, of its build and of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    texts = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    texts += [*(text for extra in EXTRAS for text in project["project"]["optional-dependencies"][extra]), *TESTS]
    return [Requirement(text) for text in texts]


def collect(present: Sequence[str], python: str, folder: Path) -> None:
    """Download wheels, one package at a time: pip would download torch and CUDA to read their dependencies."""
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    stack, done = required(), set(map(canonicalize_name, present))
    while stack:
        requirement = stack.pop(0)
        name = canonicalize_name(requirement.name)
        if name in done or "extra" in str(requirement.marker or ""):
            continue
        done.add(name)
        with tempfile.TemporaryDirectory() as temporary:
            wanted = f"{requirement.name}{requirement.specifier}"
            subprocess.run([*PIP, "download", "--no-deps", *target, "--dest", temporary, wanted], check=True)
            (wheel,) = Path(temporary).glob("*.whl")
            (folder / wheel.name).write_bytes(wheel.read_bytes())
        stack += dependencies(folder / wheel.name, python)


def dependencies(wheel: Path, python: str) -> list[Requirement]:
    """Return the requirements of a wheel on the other machine: Linux, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    needed = map(Requirement, metadata.get_all("Requires-Dist", []))
    return [r for r in needed if r.marker is None or r.marker.evaluate({"extra": "", "python_version": python})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of Python on the machine (default: 3.12)")
    parser.add_argument("--output", type=Path, default=ROOT / "wheels")
    parser.add_argument(
        "--present", nargs="+", default=PRESENT, metavar="PACKAGE", help="packages that the machine has"
    )
    parser.add_argument("--megabytes", type=float, default=MEGABYTES, help="limit of the sum (default: 60)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for old in options.output.glob("*.whl"):
        old.unlink()
    collect(options.present, options.python, options.output)
    sizes = {wheel.name: wheel.stat().st_size for wheel in options.output.glob("*.whl")}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:5]:
        print(f"{size / 1e6:7.1f} MB  {name}")
    total = sum(sizes.values()) / 1e6
    print(f"{total:7.1f} MB in {len(sizes)} wheels in {options.output}")
    if total > options.megabytes:
        fix = "name more packages that the machine has after --present, or set --megabytes"
        raise SystemExit(
            f"error: {total:.0f} MB of wheels\n  expected: at most {options.megabytes:g} MB\n  fix:      {fix}"
        )


if __name__ == "__main__":
    main()
