"""Targets of the Makefile that no other test runs."""

import importlib
import json
import shutil
import socket
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
IN_VENV = Path(sys.executable).parent == ROOT / ".venv" / "bin"
WITHOUT_VERDICT = ("sanitizer", "speed")  # on a CPU
QUICK_CHECKS = ("batch_norm", "sanitizer")
CHECKS = ("batch_norm", "zoo", "speed", "attention", "checkpoint", "sanitizer")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not IN_VENV or shutil.which("make") is None, reason="make runs the programs of .venv")
def test_bench_measures_every_contender(tmp_path: Path) -> None:
    """`-o` keeps the environment as it is."""
    settings = [f"RESULTS={tmp_path}", "STARTUP=--repeats 1 --processes 2"]
    command = ["make", "-o", ".venv/.installed", "bench", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "startup.json").read_text(encoding="utf-8"))["results"]
    assert {"samestep train", "samestep.launch", "torchrun", "accelerate"} <= result["seconds"].keys()


@pytest.mark.long
def test_plain_loop_is_measured_with_ddp(tmp_path: Path) -> None:
    """The other contenders and cases take minutes: `make plain-loop-speed` runs them."""
    output = tmp_path / "plain_loop.json"
    settings = "--cases linear-32 --contenders plain ddp-2 --rounds 2 --turn 0.01 --no-memory --output"
    command = [sys.executable, "benchmarks/plain_loop.py", *settings.split(), str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert [row["contender"] for row in result["rows"]] == ["plain loop", "DDP"]
    assert result["notes"] == []
    assert "| DDP " in output.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.timeout(500)
@pytest.mark.skipif(shutil.which("make") is None, reason="the test runs make")
@pytest.mark.parametrize(
    "checks_run", [pytest.param(QUICK_CHECKS, marks=pytest.mark.slow), pytest.param(CHECKS, marks=pytest.mark.long)]
)
def test_gpu_checks_run_on_a_cpu(tmp_path: Path, checks_run: tuple[str, ...]) -> None:
    """The other checks start ranks or compile: `make gpu DEVICE=cpu` runs them."""
    settings = [f"RESULTS={tmp_path}", "DEVICE=cpu", f"GPU_PY={sys.executable}", f"GPU=--only {' '.join(checks_run)}"]
    done = subprocess.run(
        ["make", "gpu", *settings], cwd=ROOT, capture_output=True, text=True, timeout=450, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "gpu").glob("*-cpu.json")
    checks = json.loads(path.read_text(encoding="utf-8"))["checks"]
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(printed, key=itemgetter("check")) == sorted(checks, key=itemgetter("check"))
    verdicts = {check["check"]: check["verdict"] for check in checks}
    assert verdicts == {name: "skipped" if name in WITHOUT_VERDICT else "pass" for name in checks_run}
    assert all(f"| {name} " in path.with_suffix(".md").read_text(encoding="utf-8") for name in checks_run)


@pytest.mark.slow
@pytest.mark.parametrize("only", [pytest.param("facts", marks=pytest.mark.long), "bits"])
def test_check_that_ends_early_is_reported(only: str, tmp_path: Path) -> None:
    """`facts` reaches the time limit; `bits` asks for a GPU that this machine may lack."""
    command = [sys.executable, "benchmarks/gpu.py", "--only", only, "--output", str(tmp_path)]
    limit = ["--device", "cpu", "--seconds", "1.5"] if only == "facts" else ["--device", "cuda", "--seconds", "60"]
    if only == "bits" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run([*command, *limit], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    line = json.loads(done.stdout)
    assert (done.returncode, line["verdict"], len(line["failures"])) == (3, "fail", 1)
    assert ("limit of 1 s" if only == "facts" else "exit code 1") in line["failures"][0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="the test runs make")
@pytest.mark.parametrize(
    ("target", "checks_run"),
    [
        ("nccl", ("raw",)),
        pytest.param("nccl", ("raw", "host"), marks=pytest.mark.long),
        pytest.param("gpus", ("bits",), marks=pytest.mark.long),
        pytest.param("gpus", ("facts", "links", "layouts", "faults"), marks=pytest.mark.long),
    ],
)
def test_checks_with_several_ranks_run_on_a_cpu(target: str, checks_run: tuple[str, ...], tmp_path: Path) -> None:
    settings = [f"RESULTS={tmp_path}", "DEVICE=cpu", f"GPU_PY={sys.executable}", f"GPU=--only {' '.join(checks_run)}"]
    done = subprocess.run(
        ["make", target, *settings], cwd=ROOT, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "gpu").glob(f"*-cpu-{target}.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["device"], content["target"]) == ("cpu", target)
    assert [(line["check"], line["verdict"]) for line in content["checks"]] == [(name, "pass") for name in checks_run]
    if checks_run == ("bits",):
        (line,) = content["checks"]
        assert {name: line["numbers"][name] for name in ("tokens", "small", "backend")} == {
            "tokens": 1,  # digest on 1, 2, 3 and 4 ranks
            "small": 1,
            "backend": "gloo",
        }


@pytest.mark.slow
def test_failed_check_with_several_ranks_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_nccl.py", "gpus", "--output", str(tmp_path)]
    limit = ["--device", "cpu", "--only", "facts", "--seconds", "1.5"]
    done = subprocess.run([*command, *limit], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 3
    assert "0 passed, 1 failed, 0 without a verdict" in done.stdout
    unknown = subprocess.run([*command, "--only", "none"], cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert unknown.returncode == 2
    if torch.cuda.device_count() < 2:
        missing = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100, check=False)
        assert missing.returncode == 2


def test_results_contain_no_names_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu_checks = importlib.import_module("gpu_checks")
    results = gpu_checks.Results(tmp_path / "result.json", "cpu", "gpus", {"facts": gpu_checks.Check("", "", 1, "")})
    device = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    text = f"{socket.gethostname()}:7 connects 10.0.0.7<0>, {Path.home()}/x, {device}, NCCL 2.28.9"
    results.add({"check": "facts", "verdict": "fail", "expected": "", "failures": [text], "numbers": {"lines": [text]}})
    (line,) = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["checks"]
    shown = "HOST:7 connects ADDRESS<0>, ~/x, GPU-UUID, NCCL 2.28.9"
    assert (line["failures"], line["numbers"]) == ([shown], {"lines": [shown]})


@pytest.mark.long
def test_operations_of_a_step_beyond_a_plain_loop(tmp_path: Path) -> None:
    output = tmp_path / "operations.json"
    settings = ["--models", "ResNet-50", "--microbatches", "1", "--output", str(output)]
    command = [sys.executable, "benchmarks/gpu_operations.py", *settings]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=True)
    lines = json.loads(output.read_text(encoding="utf-8"))["lines"]
    counts = {line["step"]: line["operations"] for line in lines}
    beyond = {line["step"]: line["beyond"] for line in lines}
    assert counts["plain loop"] > 3 * 53  # convolutions and batch norms with their gradients
    assert beyond["samestep.parallel, fast"] == beyond["samestep.parallel, exact, microbatches=1"] == 0
    assert 0 < beyond["plain loop with clipping and item"] < beyond["recipe, fast"] <= 40
    assert beyond["recipe, fast"] < beyond["recipe, fast, clip_norm"] <= 40


@pytest.mark.slow
def test_lines_of_a_step_are_those_of_functions_that_ran() -> None:
    command = [sys.executable, "benchmarks/step_path.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    counted = json.loads(done.stdout)
    assert {"view/parallel_module.py", "view/divided.py", "view/gradient_sums.py", "reduce/exact.py"} <= counted[
        "by_file"
    ].keys()
    assert counted["lines"] == sum(counted["by_file"].values())
    assert not {"view/trial.py", "view/watch.py"} & counted["by_file"].keys()  # of earlier steps


@pytest.mark.long
@pytest.mark.timeout(600)
def test_wheels_for_a_gpu_machine_are_small_and_complete(tmp_path: Path) -> None:
    """Needs a package index; a wheel is large or missing only if a dependency has changed."""
    command = [sys.executable, "benchmarks/gpu_wheels.py", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {wheel.name.split("-")[0].lower(): wheel.name for wheel in tmp_path.glob("*.whl")}
    assert {"pydantic_core", "annotated_types", "hypothesis", "nvidia_ml_py"} <= names.keys()
    assert "cp312" in names["pydantic_core"]
    assert not {"torch", "torchvision", "numpy", "triton"} & names.keys()
