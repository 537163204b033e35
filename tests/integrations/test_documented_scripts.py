"""Scripts in the form of each framework's documentation with one to three other lines; `samestep verify` on scripts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.migration_pages import EXAMPLES
from helpers.started import as_torchrun, free_port, python, ranks
from helpers.system import samestep

SCRIPTS = Path(__file__).parent / "scripts"
TIMES = ("runtime", "per_second")  # in names of values that no process count repeats


@dataclass(frozen=True)
class Case:
    """A script of a framework, and the output of one run.

    Attributes:
        name: name of the script.
        lines: new lines by old ones.
        weights: the last checkpoint of the framework.
        evaluated: a line of the output with the number of evaluated samples.
        bar: end of a progress bar.
    """

    name: str
    lines: dict[str, str]
    weights: str
    values: set[str]
    evaluated: str
    bar: str


CASES = [
    Case(
        "lightning_images",
        {
            "from torch import nn": "from torch import nn\n"
            "from samestep.integrations.lightning import SamestepStrategy",
            "    trainer = Trainer(max_epochs=2, callbacks=callbacks, **options)": "    trainer = Trainer("
            "max_epochs=2, callbacks=callbacks, strategy=SamestepStrategy(microbatches=8, seed=1), **options)",
        },
        "lightning_logs/version_0/checkpoints/epoch=1-step=82.ckpt",
        {"train_loss_step", "train_loss_epoch", "valid_loss_step", "valid_loss_epoch", "test_accuracy", "lr-Adam"},
        "predictions 250",
        "41/41",
    ),
    Case(
        "accelerate_images",
        {
            "from accelerate import Accelerator": "from samestep.integrations.accelerate import Accelerator",
            '    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="logs")': "    accelerator = "
            'Accelerator(microbatches=8, cpu=True, log_with="tensorboard", project_dir="logs")',
        },
        "epoch_1/model.safetensors",
        {"accuracy"},
        "of 397",
        "88/88",
    ),
    Case(
        "transformers_text",
        {
            "    Trainer,": "",
            "    set_seed,\n)": "    set_seed,\n)\nfrom samestep.integrations.transformers import Trainer",
            "        compute_metrics=compute_metrics,": "        compute_metrics=compute_metrics, "
            "global_batch_size=16,",
        },
        "out/model.safetensors",
        {"train/loss", "train/grad_norm", "eval/loss", "eval/accuracy", "eval/count"},
        "'eval_count': 101",
        "26/26",
    ),
]


def changed(case: Case, folder: Path) -> Path:
    """Write the changed script."""
    text = (SCRIPTS / f"{case.name}.py").read_text(encoding="utf-8")
    for old, new in case.lines.items():
        assert text.count(f"{old}\n") == 1, old
        text = text.replace(f"{old}\n", f"{new}\n" if new else "")
    path = folder / f"{case.name}.py"
    path.write_text(text, encoding="utf-8")
    return path


def digest(path: Path) -> str:
    from safetensors.torch import load_file
    from torch import load

    tensors = load_file(path) if path.suffix == ".safetensors" else load(path, weights_only=False)["state_dict"]
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return all values in files of TensorBoard by name, without times."""
    values: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        tags = events.Tags()
        rows: list[tuple[str, Any]] = [(name, event) for name in tags["scalars"] for event in events.Scalars(name)]
        for name, event in rows:
            if not any(text in name for text in TIMES):
                values.setdefault(name, []).append((event.step, event.value))
    return values


def run(case: Case, processes: int, folder: Path) -> tuple[str, Sequence[Any], str]:
    """Run the changed script; return the digest of the weights, the logged values and the output of rank 0."""
    folder.mkdir()
    script = changed(case, folder)
    more = {"OMP_NUM_THREADS": "1"}
    if case.name == "lightning_images":  # its trainer starts the other processes
        started = ranks(lambda *_: {}, 1, processes, cwd=folder, command=python(str(script)), more=more)
    else:
        command = python(str(script), *(["out"] if case.name == "transformers_text" else []))
        started = ranks(as_torchrun(free_port()), processes, cwd=folder, command=command, more=more)
    with started as group:
        results = group.wait(150)
    assert [result.code for result in results] == [0] * len(results), results[0].err
    return digest(folder / case.weights), sorted(logged(folder).items()), results[0].out + results[0].err


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_few_lines_make_a_documented_script_independent_of_processes(case: Case, tmp_path: Path) -> None:
    assert 1 <= len(case.lines) <= 3
    runs = [run(case, processes, tmp_path / str(processes)) for processes in (1, 3)]
    (first, values, output), (again, others, _) = runs
    assert first == again
    assert values == others
    assert case.values <= {name for name, _ in values}
    assert case.evaluated in output
    assert case.bar in output


# --- samestep verify ---


DEVICES = ("devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1", "devices = int(os.environ['LOCAL_WORLD_SIZE'])")


@pytest.mark.long
@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_verify_compares_the_script_of_an_adapter(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / f"{name}_after.py").read_text(encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text("import os\n" + text.replace(*DEVICES), encoding="utf-8")
    done = samestep("verify", script, "--processes", "2,3", "--out", tmp_path / "out", cwd=tmp_path, timeout=220)
    assert done.code == 0, done.out + done.err
    compared = [line.split() for line in done.out.splitlines() if line.startswith(("weights", "gradients", "order"))]
    assert len(compared) == 3
    assert all(row[-1] == "bits" for row in compared)
    assert (tmp_path / "out/certificate.json").exists()
