"""`samestep top`: a run of several processes is watched from outside, from before it begins to its end."""

import codecs
import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from system import Running, answer, here, samestep, tree, until
from terminal import Screen

RECIPE = Path(__file__).parents[1] / "recorded.yaml"
ROW = re.compile(r"^ *(\d+) +(\d+) +\d+ +\d+% .* (?:silent |gone )?(\d+) s$")
CUT = re.compile(r"(\x1b(\[[\d;?]*)?)?$")  # of an escape sequence, what has come of it


class Terminal:
    """A terminal of 100 columns and what is seen on it."""

    def __init__(self, theirs: int) -> None:
        self.theirs = theirs
        self.screen = Screen()
        self._lock = threading.Lock()

    def read(self, ours: int) -> None:
        """Take in what comes until nobody holds the other side any more."""
        decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
        while True:
            try:
                rest += decoder.decode(os.read(ours, 4096))
            except OSError:  # how Linux says it
                return
            whole = len(rest) - len(CUT.search(rest)[0])  # type: ignore[index]
            with self._lock:
                self.screen.feed(rest[:whole])
            rest = rest[whole:]

    def frames(self, last: int = 0) -> list[str]:
        """What was seen, one text for each time that something changed."""
        with self._lock:
            return ["\n".join(frame) for frame in self.screen.frames[-last:]]

    def must_show(self, pattern: str, what: str, *, seconds: float = 60) -> None:
        """Wait until it does; else tell what is shown instead."""
        until(lambda: self.shows(pattern), what, seconds, lambda: "\n".join(self.frames(1)))

    def shows(self, pattern: str) -> bool:
        """Whether it is, or was a moment ago, on the screen."""
        return any(re.search(pattern, frame, re.MULTILINE) for frame in self.frames(200))


@contextmanager
def terminal() -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    found = Terminal(theirs)
    reader = threading.Thread(target=found.read, args=(ours,))
    reader.start()
    try:
        yield found
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def pictured(run: str, cwd: Path) -> dict[str, Any]:
    done = samestep("top", run, "--json", cwd=cwd)
    assert done.code == 0, done.err
    picture: dict[str, Any] = json.loads(done.out)
    return picture


@pytest.mark.slow
def test_four_ranks_watched_from_before_they_begin(tmp_path: Path) -> None:
    run, hold = tmp_path / "runs" / "a", tmp_path / "hold"
    hold.write_text("2 12", encoding="utf-8")  # rank 2 stops in its twelfth step, so that there is time to look
    with terminal() as seen, Running("top", "runs/a", "--every", "0.2s", cwd=tmp_path, terminal=seen.theirs) as top:
        seen.must_show(r"^waiting for runs/a to begin$", "that it waits")
        with Running("train", RECIPE, "--processes", 4, "--name", "a", cwd=tmp_path) as train:
            seen.must_show(r"^runs/a  starting", "the run")
            seen.must_show(r"^ +2 .* in engine\.step 12", "where rank 2 is")
            seen.must_show(r"^ +3 .* in engine\.step 12, waiting", "who waits for it")
            top.must_run()
            picture = pictured("runs/a", tmp_path)
            assert (picture["state"], picture["epoch"], picture["step"], picture["steps"]) == ("running", 1, 11, 39)
            assert [row["sign"] for row in picture["ranks"]] == ["heard"] * 4
            assert [row["line"]["waits"] for row in picture["ranks"]] == [True, True, False, True]
            hold.unlink()
            assert train.wait(60).code == 0
        seen.must_show(r"^runs/a  ended\nepoch 3/3 .* 100%  step 39 of 39", "the end")
        before = tree(run)
        top.kill(signal.SIGINT)
        assert top.wait(10).code == 0
    assert tree(run) == before
    frames = [[line for line in frame.splitlines() if ROW.match(line)] for frame in seen.frames()]
    assert max(map(len, frames)) == 4, "a row is there twice"
    assert all(len(line) <= 100 for frame in seen.frames() for line in frame.splitlines())
    steps = [int(ROW.match(rows[0])[2]) for rows in frames if rows]  # type: ignore[index]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_a_rank_and_a_run_that_were_killed(tmp_path: Path) -> None:
    (tmp_path / "hold").write_text("0 8", encoding="utf-8")
    with Running("train", RECIPE, "--processes", 2, "--name", "a", cwd=tmp_path) as train:
        lines = tmp_path / "runs" / "a" / "ranks" / "rank-0.jsonl"
        train.until(lambda: lines.exists() and "in engine.step" in lines.read_text("utf-8"), "a step that is held")
        picture = pictured("runs/a", tmp_path)
        assert picture["state"] == "running"
        for process in train.processes():
            train.try_kill_process(process, signal.SIGKILL)
        until(lambda: not train.processes(), "the end of all", 30)
    picture = pictured("runs/a", tmp_path)
    assert picture["state"] == "dead"
    assert [row["sign"] for row in picture["ranks"]] == ["gone", "gone"]
    assert picture["seconds_left"] is None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("top")
    assert here("train", RECIPE, "--name", "a", "--processes", 4, "--set", "epochs=1", cwd=place) == 0
    return place


def test_one_picture_where_there_is_no_terminal(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("top", "runs/a", cwd=place) == 0
    out = capsys.readouterr().out
    assert out.startswith("runs/a  ended\nepoch 1/1 ")
    assert "\x1b" not in out
    assert [line.split()[0] for line in out.splitlines()[4:]] == ["0", "1", "2", "3"]
    assert here("top", "runs/a", "--once", cwd=place) == 0
    again = capsys.readouterr().out
    assert re.sub(r"\d+ s$", "", again, flags=re.MULTILINE) == re.sub(r"\d+ s$", "", out, flags=re.MULTILINE)


def test_a_run_that_goes_on_with_fewer_ranks_has_fewer_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [(place / "runs" / "a" / "ranks" / f"rank-{rank}.jsonl").read_bytes() for rank in range(4)]
    assert here("resume", "runs/a", "--processes", 3, cwd=place) == 0
    after = [(place / "runs" / "a" / "ranks" / f"rank-{rank}.jsonl").read_bytes() for rank in range(4)]
    assert [len(new) > len(old) and new.startswith(old) for new, old in zip(after, before, strict=True)] == [
        True,
        True,
        True,
        False,
    ]
    capsys.readouterr()
    assert here("top", "runs/a", "--json", cwd=place) == 0
    picture = answer(capsys)
    assert [row["rank"] for row in picture["ranks"]] == [0, 1, 2]
    assert (picture["state"], picture["step"]) == ("ended", 13)


def test_an_svg_of_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("top", "runs/a", "--svg", place / "top.svg", cwd=place) == 0
    assert capsys.readouterr().out == f"picture     {place}/top.svg\n"
    assert (place / "top.svg").read_text(encoding="utf-8").startswith("<svg ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs"], "runs is not a run"),
        (["runs/none", "--once"], "there is no run runs/none"),
        (["runs/none"], "there is no run runs/none"),
        (["runs/a", "--every", "0s"], "--every 0s"),
        (["runs/a", "--svg", "nowhere/a.svg"], "nowhere/a.svg cannot be written"),
    ],
)
def test_bad_input_is_refused(
    place: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(place)
    assert here("top", *arguments, cwd=place) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {message}")
    assert "\n  rule: " in said.err
    assert "\n  do:   " in said.err
    assert tree(place) == before


def test_it_does_not_import_torch(place: Path) -> None:
    from test_architecture import loaded_by

    loaded = loaded_by(
        "import contextlib, io\nfrom samestep.cli.main import main\nwith contextlib.redirect_stdout(io.StringIO()):\n"
        f"    assert main(['top', '{place}/runs/a', '--json']) == 0"
    )
    assert "samestep.tools.top.watch" in loaded
    assert "torch" not in loaded
