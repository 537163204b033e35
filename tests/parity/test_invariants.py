"""Weights of shipped recipes equal the values recorded on this type of machine.

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
from helpers.system import here, weights
from samestep.errors import EXIT_DONE

RECORDED = Path(__file__).with_name("invariants.json")
WEIGHTS = {"digits": DIGITS, "tokens": ("epochs=1", "metrics=[]"), "images": IMAGES}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["digits", pytest.param("tokens", marks=pytest.mark.long), pytest.param("images", marks=pytest.mark.long)]
)
def test_weights_on_1_and_3_processes(
    request: pytest.FixtureRequest, tmp_path: Path, pictures: Path, name: str
) -> None:
    arguments = [*WEIGHTS[name], *([f"data.options.path={pictures}"] if name == "images" else [])]
    digests = []
    for processes in (1, 3):
        command = ("train", name, "--exact", "--processes", processes, "--name", f"on-{processes}", *arguments)
        assert here(*command, cwd=tmp_path) == EXIT_DONE
        digests.append(weights(tmp_path / "runs" / f"on-{processes}"))
    assert digests[0] == digests[1]
    expect(request, f"weights of {name}", list(digests[0]))
