"""Components that do not fit each other: exit code 2 with their name, before the first update."""

from pathlib import Path

import pytest

from helpers.surroundings import RecordFault, require_bounded
from helpers.system import here

CASES = {
    "the function of a model returns nothing": ("model", "helpers.misfits:no_model", "E_VALUE"),
    "the function of a model returns a class": ("model", "helpers.misfits:model_class", "E_VALUE"),
    "a model of inputs of another width": ("model", "helpers.misfits:of_other_inputs", "E_SHAPE"),
    "a model of token numbers for images": ("model", "helpers.misfits:of_integers", "E_SHAPE"),
    "a model of two inputs for one": ("model", "helpers.misfits:of_two_inputs", "E_SHAPE"),
    "an import path without a module": ("model", ":x", "E_UNKNOWN_NAME"),
    "a relative import path": ("model", "..mine:Net", "E_UNKNOWN_NAME"),
    "an import path with a call": ("model", "helpers.misfits:model()", "E_UNKNOWN_NAME"),
    "a loss that returns nothing": ("loss", "helpers.misfits:no_loss", "E_SHAPE"),
    "a loss that returns a number": ("loss", "helpers.misfits:number", "E_SHAPE"),
    "a loss of targets of another shape": ("loss", "helpers.misfits:of_other_targets", "E_SHAPE"),
    "the function of an optimizer returns nothing": ("optimizer", "helpers.misfits:no_optimizer", "E_VALUE"),
    "the function of data returns nothing": ("data", "helpers.misfits:no_data", "E_VALUE"),
}
KINDS = ("None", "text", "integers", "booleans", "half", "flat", "detached")


def refused(path: Path, capfd: pytest.CaptureFixture[str], *options: str) -> str:
    """Train with options that must be refused; return the first line of the report."""
    capfd.readouterr()
    plain = (
        "batch_size=8",
        "microbatches=4",
        "model.options={}",
        "data.options={}",
        "loss.options={}",
        "optimizer.options={lr: 0.1}",
    )
    arguments = ("train", "digits", "--name", "a", *plain, *options)
    code = here(*arguments, cwd=path)
    _, report = capfd.readouterr()
    assert code == 2, report
    require_bounded(report)
    (title,) = [line for line in report.splitlines() if line.startswith("error: ")]
    assert not list(path.glob("runs/a/checkpoints/step-*"))
    return title


@pytest.mark.slow
def test_components_that_do_not_fit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    for number, (fault, (section, name, code)) in enumerate(CASES.items()):
        path = tmp_path / str(number)
        path.mkdir()
        title = refused(path, capfd, f'{section}.name="{name}"')
        assert code in title, fault
        record_fault(fault, f"exit code 2; {code}")
    for kind in KINDS:
        path = tmp_path / kind
        path.mkdir()
        options = ('model.name="helpers.misfits:model"', f'model.options={{kind: "{kind}"}}')
        title = refused(path, capfd, *options)
        assert "E_SHAPE" in title, kind
        record_fault(f"a model returns {kind} in place of logits", "exit code 2; E_SHAPE")
