"""`samestep verify` as a command: what it refuses, what it writes, what it leaves."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.errors import EXIT_DONE, EXIT_INPUT, EXIT_STOPPED
from system import Running, samestep, tree, until

EXAMPLES = Path(__file__).parents[2] / "examples"
PLANTED = Path(__file__).parents[1] / "planted"
Refused = Callable[..., str]

IDLE = "import samestep\n\nwith samestep.start():\n    pass\n"
RAISING = "import samestep\n\nwith samestep.start() as world:\n    raise ArithmeticError('no such number')\n"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a verification that must be refused; what it said. It leaves every file as it was."""
    (tmp_path / "idle.py").write_text(IDLE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        before = tree(tmp_path)
        code = main(["verify", *map(str, arguments)])
        said = capsys.readouterr()
        assert (code, said.out) == (EXIT_INPUT, "")
        for part in ("error: ", "  rule: ", "  do:   "):
            assert len(re.findall(rf"^{part}\S", said.err, re.MULTILINE)) == 1, said.err
        assert tree(tmp_path) == before
        return said.err

    return run


REFUSED = {
    "nothing": ((), "one recipe, or --script FILE, is needed"),
    "no recipe": (("digitz",), "did you mean digits?"),
    "a recipe and arguments": (("digits", "more"), "one recipe, or --script FILE, is needed"),
    "no script": (("--script", "gone.py"), "there is no file gone.py"),
    "set of a script": (("--script", "idle.py", "--set", "a=1"), "--set with --script"),
    "processes": (("digits", "--processes", "1,two"), "--processes 1,two"),
    "no processes": (("digits", "--processes", "0"), "--processes 0"),
    "too many processes": (("digits", "--processes", "1,9"), "9 ranks share the data but the recipe has 8 shards"),
    "too many to resume on": (
        ("digits", "--kill-at", "1", "--resume-on", "12"),
        "12 ranks share the data but the recipe has 8 shards",
    ),
    "steps": (("digits", "--steps", "0"), "--steps 0"),
    "kill alone": (("digits", "--kill-at", "1"), "belong together"),
    "resume alone": (("digits", "--resume-on", "1"), "belong together"),
    "kill too late": (("digits", "--kill-at", "4", "--resume-on", "1"), "one of the steps, 1 to 3"),
    "tolerance of bits": (("digits", "--tolerance", "1e-6"), "--tolerance with an exact reduction"),
    "no tolerance": (("digits", "--reduction", "fast", "--tolerance", "0"), "--tolerance 0"),
    "no patience": (("digits", "--patience", "-1"), "--patience -1"),
    "a file in the way": (("digits", "--out", "idle.py"), "idle.py cannot be made"),
    "a bad override": (("digits", "--set", "step.sed=1"), "did you mean step.seed?"),
    "an idle script": (("--script", "idle.py", "--processes", "1,2"), "idle.py made no step with samestep.Engine"),
    "a script that starts ranks": (
        ("--script", EXAMPLES / "own_loop.py", "--processes", "1", "--", "3"),
        "samestep.launch() is called in a rank",
    ),
    "a missing folder": (
        ("images", "--set", "data.options.path=gone", "--processes", "1,2"),
        "there is no folder gone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_input_is_refused(refused: Refused, name: str) -> None:
    arguments, said = REFUSED[name]
    assert said in refused(*arguments)


def test_script_that_fails_is_told_once_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    done = samestep("verify", "--script", "raising.py", "--processes", "2,1", cwd=tmp_path)
    assert done.code == 1
    assert len(re.findall(r"^error: rank \d failed.*: ArithmeticError: no such number$", done.err, re.MULTILINE)) == 1
    assert done.err.count("Traceback") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["raising.py"]


def test_certificate_of_a_script_with_arguments(tmp_path: Path) -> None:
    script = PLANTED / "right_resume.py"
    done = samestep("verify", "--script", script, "--processes", "2,1", "--steps", "2", "--", "{folder}", cwd=tmp_path)
    assert done.code == EXIT_DONE, done.err
    assert "holds: 2 runs computed the same, bit for bit" in done.out
    assert done.err.splitlines() == ["running right_resume.py on 2 processes", "running right_resume.py on 1 process"]
    [folder] = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["certificate.html", "certificate.json"]
    said = json.loads((folder / "certificate.json").read_text())
    assert (said["subject"], said["arguments"], said["steps"]) == ("right_resume.py", ["{folder}"], [1, 2])
    assert said["environment"]["threads"] == [1]


def test_interrupt_ends_it_and_leaves_no_process(tmp_path: Path) -> None:
    with Running("verify", "digits", "--processes", "3", cwd=tmp_path) as running:
        running.until(lambda: list(tmp_path.glob("runs/*/.trials-*/trial-1/rank-2.jsonl")), "the ranks are there")
        running.kill_group(signal.SIGINT)
        done = running.wait(30)
        assert done.code == EXIT_STOPPED
        assert "Traceback" not in done.err
        until(lambda: not running.processes(), "every process has ended", 30)
    assert not (tmp_path / "runs").exists()


def test_what_is_in_the_folder_stays(tmp_path: Path) -> None:
    kept = tmp_path / "out" / "trials" / "mine.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    script = PLANTED / "right_loss_between_samples.py"
    done = samestep("verify", "--script", script, "--processes", "1,2", "--out", "out", cwd=tmp_path)
    assert done.code == EXIT_DONE, done.err
    assert "note: the loss of a shard is neither the sum of its pieces" in done.out
    assert sorted(tree(tmp_path / "out")) == ["certificate.html", "certificate.json", "trials", "trials/mine.txt"]
