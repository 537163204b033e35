"""`--strategy` and `--mesh`: a run under one layout, gone on under another; what cannot be ends with exit code 2."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file

from samestep.cli.main import main
from samestep.config import Mesh, StrategyPart, settle
from samestep.errors import EXIT_DONE, EXIT_INPUT, InputError
from system import answer, events, here, tree, weights

RECIPE = Path(__file__).parents[1] / "recorded.yaml"
STRATEGIES = ("ddp", "dp", "fsdp", "hsdp", "placed", "tp", "pp")
MESHES = (
    "",
    "tensor=2",
    "shard=2",
    "replicate=3",
    "pipeline=2",
    "tensor=2,shard=2",
    "pipeline=2,shard=2",
    "replicate=2",
)


def axes(text: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (said.split("=") for said in text.split(",") if said)}


def is_refused(strategy: str, mesh: str, processes: int) -> bool:
    try:
        settle(StrategyPart(name=strategy, mesh=Mesh(**axes(mesh))), processes)  # type: ignore[arg-type]
    except InputError:
        return True
    return False


WRONG = [case for case in product(STRATEGIES, MESHES, (3, 4)) if is_refused(*case)]


def test_there_are_enough_wrong_combinations() -> None:
    assert len(WRONG) >= 40
    assert {strategy for strategy, _, _ in WRONG} == set(STRATEGIES)


@pytest.mark.parametrize(("strategy", "mesh", "processes"), WRONG)
def test_wrong_combination_is_refused_with_a_layout_that_would_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    strategy: str,
    mesh: str,
    processes: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ["--strategy", strategy, *(["--mesh", mesh] if mesh else []), "--processes", str(processes)]
    assert main(["train", str(RECIPE), *chosen]) == EXIT_INPUT
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len(re.findall(r"^  rule: \S", said, re.MULTILINE)) == 1
    (advice,) = re.findall(r"^  do:   (\S.*)", said, re.MULTILINE)
    assert tree(tmp_path) == {}
    assert not is_refused(*advised(advice, strategy, mesh, processes)), advice


def advised(advice: str, strategy: str, mesh: str, processes: int) -> tuple[str, str, int]:
    """The combination that a piece of advice leads to; of alternatives, the last."""
    other, sizes = (re.search(pattern, advice) for pattern in (r"--strategy (\w+)", r"--mesh ([\w=,]+)"))
    if not other and not sizes:
        found = re.search(r"--processes (\d+)", advice)
        assert found, advice
        return strategy, mesh, int(found[1])
    return other[1] if other else strategy, sizes[1] if sizes else mesh, processes


@pytest.mark.parametrize("mesh", ["tensor", "tensor=0", "tensor=x", "rows=2", "tensor=2,tensor=2", "tensor=2;shard=2"])
def test_mesh_that_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, mesh: str) -> None:
    assert here("train", RECIPE, "--mesh", mesh, cwd=tmp_path) == EXIT_INPUT
    assert f"error: --mesh {mesh}\n  rule: AXIS=N" in capsys.readouterr().err
    assert tree(tmp_path) == {}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on one process, `single`, and one under `fsdp` on four, `divided`."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, chosen in (("single", ()), ("divided", ("--strategy", "fsdp", "--processes", 4))):
        code = here("train", "digits", *chosen, "--name", name, "--set", "epochs=1", "step.threads=1", cwd=folder)
        assert code == EXIT_DONE
    return folder


def test_a_divided_run_is_that_of_one_process_to_rounding(place: Path) -> None:
    single, divided = (place / "runs" / name for name in ("single", "divided"))
    (one,), (four,) = events(single, "evaluation"), events(divided, "evaluation")
    assert four["samples"] == one["samples"] == 360
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-2)
    assert [event["loss"] for event in events(divided, "step")][:3] == pytest.approx(
        [event["loss"] for event in events(single, "step")][:3], rel=1e-5
    )
    (note,) = [event["text"] for event in events(divided, "note") if event["text"].startswith("layout")]
    assert note.splitlines()[0] == "layout fsdp: shard 4"
    (facts,) = json.loads((divided / "environment.json").read_text())
    assert facts["strategy"] == "fsdp"


def test_checkpoint_of_a_divided_run_is_one_like_any_other(place: Path) -> None:
    single, divided = (place / "runs" / name / "checkpoints" / "last" for name in ("single", "divided"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, four = load_file(single / file), load_file(divided / file)
        assert {name: (t.shape, t.dtype) for name, t in one.items()} == {
            name: (t.shape, t.dtype) for name, t in four.items()
        }
    one, four = (json.loads((folder / "state.json").read_text()) for folder in (single, divided))
    assert one["optimizer"] == four["optimizer"]
    assert one["aliases"] == four["aliases"]


@pytest.mark.slow
def test_a_run_goes_on_and_is_evaluated_under_another_layout(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "runs" / "divided"
    found = []
    for chosen in ((), ("--processes", 3), ("--processes", 4, "--strategy", "hsdp", "--mesh", "shard=2")):
        capsys.readouterr()
        assert here("eval", run, *chosen, "--json", cwd=place) == EXIT_DONE
        found.append(answer(capsys))
    assert found[1] == found[0]
    assert found[2]["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
    before = weights(run)
    assert here("resume", run, "--strategy", "ddp", "--processes", 2, cwd=place) == EXIT_DONE  # it is done already
    assert weights(run) == before


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "mesh", "processes"),
    [
        ("fsdp", "", "1,2,3"),
        ("tp", "", "1,2"),
        ("pp", "", "1,2"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("hsdp", "shard=2", "1,4"), ("ddp", "tensor=2", "1,4"), ("fsdp", "tensor=2", "1,4"))
        ),
        *(pytest.param(name, "pipeline=2", "1,4", marks=pytest.mark.long) for name in ("ddp", "pp")),
    ],
)
def test_certificate_says_which_level_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str, mesh: str, processes: str
) -> None:
    layout = ("--strategy", strategy, *(("--mesh", mesh) if mesh else ()))
    options = ("--processes", processes, "--steps", 2, "--double", "--json", "--out", tmp_path / "certificate")
    recipe: tuple[object, ...] = ("digits",)
    if strategy == "fsdp" and not mesh:
        options = (*options, "--kill-at", 2, "--resume-on", 2)
    elif strategy != "hsdp":
        sizes = (
            "model.width=32",
            "model.heads=4",
            "model.blocks=2",
            "data.train_tokens=4000",
            "data.evaluation_tokens=640",
        )
        recipe = ("language", "--set", *sizes)
    assert here("verify", *recipe, *layout, *options, cwd=tmp_path) == EXIT_DONE
    said = answer(capsys)
    assert (said["holds"], said["level"], said["precision"]) == (True, "1e-12 relative", "float64")
    for run in said["comparisons"]:
        assert run["quantities"]["order of samples"] == "bits"
    on_three = said["comparisons"][-1] if strategy == "fsdp" and not mesh else None
    assert on_three is None or on_three["quantities"]["gradients"] != "bits", "sums are taken in another order"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("dp", "1"), ("placed", "1,2")])
def test_several_devices_of_a_rank_have_a_certificate_of_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, processes: str
) -> None:
    place = "strategy.place={stem: 0, blocks: 0, head: 1}" if name == "placed" else "strategy.name=dp"
    chosen = ("--strategy", name, "--set", "strategy.devices=2", place, "--processes", processes, "--steps", 2)
    assert here("verify", "digits", *chosen, "--json", "--out", tmp_path / "certificate", cwd=tmp_path) == EXIT_DONE
    said = answer(capsys)
    assert (said["holds"], said["level"]) == (True, "bits")
    assert [run["first_difference"] for run in said["comparisons"]] == [None] * len(said["comparisons"])
