"""Commands as ranks of torchrun and Slurm: one run, one report, and the bits of `samestep train`."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helpers.started import Variables, as_srun, as_torchrun, free_port, python, ranks
from helpers.system import Done, events, here, state_of, until, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
PLAIN = ("epochs=1",)

LEAVES_WORKERS = """
import samestep, torch

data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64))
samestep.init()
left = iter(samestep.loader(data, batch_size=16, num_workers=1))
next(left)
print("done")
"""


def launchers() -> dict[str, Callable[[Path], Variables]]:
    return {
        "torchrun": lambda place: as_torchrun(free_port()),
        "srun": lambda place: as_srun(str(abs(hash(place)))),
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, of two processes that `samestep train` launched."""
    place = tmp_path_factory.mktemp("launchers")
    assert here("train", RECIPE, *PLAIN, "--name", "launched", "--processes", 2, cwd=place) == 0
    return place


def single_error(ended: list[Done], code: int) -> str:
    """Return the standard error of the one rank that reported a failure."""
    assert [each.code for each in ended] == [code] * len(ended), str(ended)
    errors = [each.err for each in ended if "error:" in each.err]
    assert len(errors) == 1, ended
    return errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "srun" else pytest.mark.long) for name in launchers()]
)
def test_any_launcher_trains_to_the_same_bits(name: str, place: Path) -> None:
    """And listens on addresses of this machine only."""
    variables = launchers()[name](place)
    hold = place / "hold"
    hold.write_text("0 12", encoding="utf-8")
    with ranks(variables, 2, "train", RECIPE, *PLAIN, "--name", name, cwd=place) as started:
        until(lambda: len(events(place / "runs" / name, "step")) >= 4, "4 steps", 60)
        addresses = [listening(process.pid) for process in started.processes]
        hold.unlink()
        ended = started.wait()
    assert addresses == [{"127.0.0.1"}] * 2
    assert [each.code for each in ended] == [0, 0], str(ended)
    assert f"runs/{name}" in ended[0].out
    assert ended[1].out == ended[1].err == ""
    assert weights(place / "runs" / name) == weights(place / "runs" / "launched")
    (environment,) = json.loads((place / "runs" / name / "environment.json").read_text(encoding="utf-8"))
    assert environment["processes"] == 2
    files = sorted((place / "runs" / name / "ranks").iterdir())
    assert [path.name for path in files] == ["rank-0.jsonl", "rank-1.jsonl"]
    assert [json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["step"] for path in files] == [13, 13]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch"])
def test_launcher_of_torch_trains_to_the_same_bits(place: Path, module: str) -> None:
    arguments = ["--nproc-per-node", "2", "--master-port", free_port(), "-m", "samestep", "train", RECIPE]
    command = python("-W", "ignore", "-m", module)
    with ranks(lambda r, s: {}, 1, *arguments, *PLAIN, "--name", module, cwd=place, command=command) as started:
        (ended,) = started.wait()
    assert ended.code == 0, str(ended)
    assert weights(place / "runs" / module) == weights(place / "runs" / "launched")


@pytest.mark.long
@pytest.mark.slow
def test_a_resumed_and_an_evaluated_run(place: Path) -> None:
    run = place / "runs" / "stopped"
    hold = place / "hold"
    hold.write_text("0 20", encoding="utf-8")
    with ranks(as_srun("4711"), 2, "train", RECIPE, *PLAIN, "--name", "stopped", cwd=place) as started:
        until(lambda: len(events(run, "step")) >= 8, "8 steps", 60)
        started.kill(signal.SIGTERM)
        hold.unlink()
        ended = started.wait()
    assert [each.code for each in ended] == [130, 130], str(ended)
    assert f"samestep resume runs/{run.name}" in ended[0].out
    assert 0 < state_of(run)["step"] < 13
    with ranks(as_srun("817"), 3, "resume", run, cwd=place) as started:
        assert [each.code for each in started.wait()] == [0, 0, 0]
    assert weights(run) == weights(place / "runs" / "launched")
    with ranks(as_srun("4712"), 2, "eval", run, "--json", cwd=place) as started:
        first, second = started.wait()
    assert (first.code, second.code, second.out) == (0, 0, "")
    assert json.loads(first.out)["samples"] == 30


@pytest.mark.long
@pytest.mark.slow
def test_a_job_that_slurm_requeues_goes_on_with_its_run(place: Path) -> None:
    run = place / "runs" / "requeued"
    arguments = ["train", RECIPE, *PLAIN, "--name", "requeued", "--checkpoint-every", 4]
    hold = place / "hold"
    hold.write_text("0 20", encoding="utf-8")
    with ranks(as_srun("99"), 2, *arguments, cwd=place) as started:
        last = run / "checkpoints" / "last"  # points at a checkpoint a moment after that is there
        until(lambda: last.resolve().name == "step-000000008", "a checkpoint of step 8", 60)
        started.kill(signal.SIGKILL)
        hold.unlink()
        started.wait()
    with ranks(as_srun("99", restarts=1), 3, *arguments, cwd=place) as started:
        ended = started.wait()
    assert [each.code for each in ended] == [0, 0, 0], str(ended)
    assert [event["step"] for event in events(run, "resume")] == [8]
    assert weights(run) == weights(place / "runs" / "launched")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", RECIPE, "--name", "launched"], "the run runs/launched exists"),
        (["train", RECIPE, "--processes", 3], "--processes 3, but Slurm has started 2 processes"),
        *(
            pytest.param(arguments, message, marks=pytest.mark.long)
            for arguments, message in (
                (["train", RECIPE, "--devices", "0,1"], "--devices 0,1, but Slurm has started 2 processes"),
                (["train", RECIPE, "--max-restarts", 2], "--max-restarts 2, but Slurm has started 2 processes"),
                (["train", RECIPE, "microbatches=1"], "2 ranks share the data"),
                (["resume", "runs/none"], "runs/none is not a run"),
            )
        ),
    ],
)
def test_bad_input_is_reported_once(arguments: list[object], message: str, place: Path) -> None:
    before = sorted((place / "runs").iterdir())
    with ranks(as_srun("5"), 2, *arguments, cwd=place) as started:
        errors = single_error(started.wait(), 2)
    assert errors.startswith("error: ")
    assert message in errors
    assert sorted((place / "runs").iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_fails_is_reported_once(rank: int, place: Path) -> None:
    name = f"fails-{rank}"
    failing = ["loss.name=helpers.recorded:failing", f"loss.options.rank={rank}", "loss.options.call=6"]
    options = [*failing, "--name", name]
    with ranks(as_srun(f"6{rank}"), 3, "train", RECIPE, *options, cwd=place) as started:
        ended = started.wait()
    assert ended[rank].err.count("error:") == 1
    assert f"error: rank {rank} failed" in ended[rank].err
    assert "the sum does not add up" in ended[rank].err
    assert all(each.code == 1 for each in ended)
    assert not any("error" in each.err.lower() for each in ended if each is not ended[rank]), ended
    others = [number for number in range(3) if number != rank]
    for other in others:
        assert "lost its connection" in (place / "runs" / name / "logs" / f"rank-{other}.log").read_text()


def test_commands_that_start_ranks_of_their_own_refuse_to_be_one(tmp_path: Path) -> None:
    with ranks(as_srun("8"), 2, "verify", "digits", cwd=tmp_path) as started:
        ended = started.wait()
    assert [each.code for each in ended] == [2, 2]
    assert "samestep verify is rank 0 of 2 processes that Slurm started" in ended[0].err


def test_variables_in_part_are_refused(tmp_path: Path) -> None:
    with ranks(lambda r, s: {"RANK": "0", "WORLD_SIZE": "2"}, 1, "train", "digits", cwd=tmp_path) as started:
        (ended,) = started.wait()
    assert ended.code == 2
    assert "RANK, WORLD_SIZE set, but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in ended.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_script_that_leaves_loader_workers_behind_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAVES_WORKERS, encoding="utf-8")
    with ranks(as_srun("11"), 2, script, cwd=tmp_path, command=python()) as started:
        ended = started.wait(60)
    assert [(each.code, each.out) for each in ended] == [(0, "done\n")] * 2, str(ended)


def listening(process: int) -> set[str]:
    """Return the addresses on which a process listens."""
    connections = psutil.Process(process).net_connections()
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
