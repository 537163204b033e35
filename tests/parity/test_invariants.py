"""Weights and certificates of shipped recipes equal the values recorded on this type of machine.

Bits depend on the processor type, its instruction set and the torch version, so values are recorded for each such
combination in `invariants.json`. On a machine without recorded values only the equality between process counts is
tested. Record the values of the present machine with `pytest tests/parity/test_invariants.py --record-invariants`.
"""

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small_recipes import DIGITS, IMAGES
from helpers.system import answer, here, weights
from samestep.errors import EXIT_DONE

RECORDED = Path(__file__).with_name("invariants.json")
WEIGHTS = {
    "digits": DIGITS,
    "tokens": ("epochs=1", "metrics=[]"),
    "images": IMAGES,
}
CERTIFICATES = {
    "digits": (),
    "tokens": (),
    "images": WEIGHTS["images"],
    "language": ("data.options.train_tokens=4096", "data.options.evaluation_tokens=1024"),
    "vit_tiny_patch16_224": (
        "data.options.image_size=32",
        "model.options.img_size=32",
        "model.options.patch_size=8",
        "model.options.depth=2",
        "batch_size=22",
        "metrics=[]",
    ),
}


def machine() -> str:
    """The combination that bits depend on."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        platform.processor(),
    )
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()}, {model}, {capability}, torch {torch.__version__}"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def expect(request: pytest.FixtureRequest, key: str, value: Any) -> None:
    """Compare `value` with the recorded one, or record it."""
    values: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    of_machine = values.setdefault(machine(), {})
    if request.config.getoption("--record-invariants"):
        of_machine[key] = value
        RECORDED.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    elif key in of_machine:
        assert of_machine[key] == value


def overrides(name: str, settings: tuple[str, ...], pictures: Path) -> list[str]:
    if name in ("images", "vit_tiny_patch16_224"):
        settings = (*settings, f"data.options.path={pictures}")
    return list(settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["digits", pytest.param("tokens", marks=pytest.mark.long), pytest.param("images", marks=pytest.mark.long)]
)
def test_weights_on_1_and_3_processes(
    request: pytest.FixtureRequest, tmp_path: Path, pictures: Path, name: str
) -> None:
    arguments = overrides(name, WEIGHTS[name], pictures)
    digests = []
    for processes in (1, 3):
        command = ("train", name, "--exact", "--processes", processes, "--name", f"on-{processes}", *arguments)
        assert here(*command, cwd=tmp_path) == EXIT_DONE
        digests.append(weights(tmp_path / "runs" / f"on-{processes}"))
    assert digests[0] == digests[1]
    expect(request, f"weights of {name}", list(digests[0]))


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    CERTIFICATES,
)
def test_certificate(
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    pictures: Path,
    name: str,
) -> None:
    arguments = overrides(name, CERTIFICATES[name], pictures)
    command = (
        "verify",
        name,
        "--processes",
        "1,3",
        "--exact",
        "--steps",
        "2",
        "--json",
        "--out",
        tmp_path,
        *arguments,
    )
    assert here(*command, cwd=tmp_path) == EXIT_DONE
    certificate = answer(capsys)
    [comparison] = certificate["comparisons"]
    for part in ("quantities", "compared"):  # the files of a recipe's run are no quantity of its training
        comparison[part].pop("written files", None)
    verdicts = [
        certificate["holds"],
        certificate["level"],
        certificate["steps"],
        certificate["samples"],
        list(comparison["quantities"].values()),
        list(comparison["compared"].values()),
    ]
    expect(request, f"certificate of {name}", verdicts)
