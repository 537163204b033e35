"""Functions that are defined in a notebook train on several processes, to the bits of a script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"
HASH = re.compile(r"\b[0-9a-f]{64}\b")
FAILS = """
from samestep.session import start

def fails():
    with start() as world:
        if world.rank == 1:
            raise ValueError("of rank 1")
        world.barrier()

try:
    samestep.launch(fails, processes=2)
except samestep.launcher.launch.RankError as error:
    print("caught:", str(error).splitlines()[0])
"""
TENSORS = """
from samestep.session import start

class Net(nn.Linear):
    pass

def made(size):
    with start() as world:
        return Net(size, size), torch.full((size,), float(world.size)), world.rank

net, tensor, rank = samestep.launch(made, 3, processes=2)
print(type(net) is Net, tensor.tolist(), rank)
samestep.launch(lambda: (number for number in range(3)), processes=1)
"""


def run(*command: object, cwd: Path) -> str:
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(cwd), "IPYTHONDIR": str(cwd), "JUPYTER_PLATFORM_DIRS": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_kernel_launches_what_its_cells_define(tmp_path: Path) -> None:
    source, _, _ = EXAMPLE.read_text(encoding="utf-8").partition('if __name__ == "__main__":')
    cells = [source, "samestep.launch(train, processes=3)", "import samestep.launcher.launch\n" + FAILS, TENSORS]
    paths = [tmp_path / f"cell-{number}.py" for number in range(len(cells))]
    for path, cell in zip(paths, cells, strict=True):
        path.write_text(cell, encoding="utf-8")
    printed = run(sys.executable, ROOT / "tests" / "helpers" / "notebook_kernel.py", *paths, cwd=tmp_path)
    expected = run(sys.executable, EXAMPLE, cwd=tmp_path)
    assert HASH.findall(printed) == HASH.findall(expected), printed
    assert "caught: rank 1 failed" in printed
    assert "True [2.0, 2.0, 2.0] 0" in printed
    assert "the result of the function (generator) cannot be sent" in printed


@pytest.mark.slow
def test_example_trains_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(ROOT / "examples" / "two_processes.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    losses = re.findall(r"one process (\d\.\d{4}), on two (\d\.\d{4})", printed)
    assert len(losses) == 3
    assert [float(loss) for loss, _ in losses] == pytest.approx([float(loss) for _, loss in losses], abs=2e-4)
    assert float(losses[-1][0]) < float(losses[0][0])
