"""Exceptions that are hard to report: each ends with one bounded report, and the run resumes to the same weights."""

import json
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.leaks import leaks_since, snapshot
from helpers.raising import FORGED
from helpers.shared_memory import abandoned, require_none_left
from helpers.surroundings import RecordFault, nothing_left_behind, require_bounded, temporary_folder, wait_for_end
from helpers.system import Running, here, until, weights

RECIPE = Path(__file__).parents[1] / "helpers/raising.yaml"
THREAD = "a thread of the user outlives the ranks, then Ctrl-C"


@dataclass(frozen=True)
class Fault:
    """Exception of rank 1, or of a loader worker of any rank."""

    kind: str  # key in helpers/raising.py
    title: str  # regular expression for the first line of the report
    code: int = 1
    is_long: bool = False  # the report is shorter than the text, which the log of the rank contains
    workers: int = 0
    inside: tuple[str, ...] = ()  # texts of the report


RANK_1 = r"rank 1 failed in step \d+: "
CASES = (
    Fault("unprintable", RANK_1 + r"Unprintable: <no text: Unprintable\.__str__ raised RuntimeError>"),
    Fault("nameless", RANK_1 + r"\\n" + re.escape(FORGED) + ": a problem"),
    Fault("long", RANK_1 + r"ValueError: x+ \.\.\. 500,\d{3} characters \.\.\. x+", is_long=True),
    Fault("many lines", RANK_1 + "ValueError: line 0", is_long=True, inside=("line 99999", "lines are left out")),
    Fault("chain", RANK_1 + "ValueError: cause 1999", is_long=True, inside=("ValueError: cause 0", "cause 1999")),
    Fault("invalid UTF-8", RANK_1 + r"FileNotFoundError: .*caf\\udce9\.png'"),
    Fault("forged", RANK_1 + r"ValueError: \\x1b\[2J\\x1b\]0;title\\x07a problem"),
    Fault("exit with text", r"rank 1 ended with exit code 1 in step \d+, before .*: no file \\x1b\[31mdata\.csv"),
    Fault(
        "unprintable in a worker",
        ".*RuntimeError: Caught Unprintable in DataLoader",
        workers=1,
        inside=("sample",),
    ),
    Fault(
        "local class in a worker", ".*RuntimeError: Caught Local in DataLoader worker", workers=1, inside=("sample",)
    ),
    Fault("unpicklable sample", "a loader worker cannot send a batch: .*generator", code=2, workers=1),
    Fault("hang in a worker", r"ranks? .* hangs?: no progress", workers=1),
)
ROWS = {
    "unprintable": "an exception whose `__str__` and `__repr__` raise",
    "nameless": "an exception of a class with a forged name and without `__name__`",
    "long": "an exception with a text of 100 MB",
    "many lines": "an exception with a text of 100,000 lines",
    "chain": "a chain of 2,000 exceptions",
    "invalid UTF-8": "an exception with a file name that is not UTF-8",
    "forged": "an exception with terminal escapes and a forged report",
    "exit with text": '`sys.exit("text")` in rank 1',
    "unprintable in a worker": "an exception without a text in a loader worker",
    "local class in a worker": "an exception in a loader worker that cannot be pickled",
    "unpicklable sample": "a sample of a loader worker that cannot be pickled",
    "hang in a worker": "a loader worker hangs",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [0, 1])
def test_exceptions(
    workers: int,
    undisturbed: tuple[str, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    record_fault: RecordFault,
) -> None:
    """One run has several faults in turn, and is resumed after each."""
    run, options = tmp_path / "runs/a", ("--processes", 2, "--workers", workers, "--checkpoint-every", 1)
    options = (*options, "--loggers", "jsonl")
    before, memory = snapshot(), abandoned()
    for case in (case for case in CASES if case.workers == workers):
        rank = "any" if workers else 1
        (tmp_path / "fault.json").write_text(json.dumps({"rank": rank, "kind": case.kind}), encoding="utf-8")
        start = ("resume", run) if run.exists() else ("train", RECIPE, "--name", "a")
        limit = "5s" if case.kind.startswith("hang") else "10m"
        capfd.readouterr()
        code = here(*start, *options, "--hang-after", limit, cwd=tmp_path)
        seconds = time.time() - (tmp_path / "fired.json").stat().st_mtime
        _, report = capfd.readouterr()
        assert code == case.code, report
        require_bounded(report)
        titles = [line for line in report.splitlines() if not line.startswith(" ")]
        assert len(titles) == 1, report
        assert re.match(f"error: {case.title}", titles[0]), report
        assert re.search(r" \[E_\w+\]$", titles[0])
        assert all(text in report for text in case.inside), report
        assert seconds < 10, "from the fault to the end"
        log = run / "logs/rank-1.log"
        assert not case.is_long or log.stat().st_size > 100_000
        record_fault(ROWS[case.kind], f"exit code {code}; resumed on 2: the same weights")
    assert here("resume", run, *options, cwd=tmp_path) == 0
    assert weights(run) == undisturbed
    until(lambda: not leaks_since(before), "no process is left", 10, instead=lambda: leaks_since(before))
    require_none_left(memory)


@pytest.mark.slow
def test_interrupt_of_threads(tmp_path: Path, record_fault: RecordFault) -> None:
    (tmp_path / "loop.py").write_text(
        "import threading, time\nfrom samestep.session import start\n"
        "with start() as world:\n"
        "    rank = world.rank\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "open(f'done-{rank}', 'w').close()\n",
        encoding="utf-8",
    )
    with (
        Running("run", "--processes", 2, "loop.py", cwd=tmp_path, variables=temporary_folder(tmp_path)) as running,
        nothing_left_behind(running, tmp_path),
    ):
        running.until(lambda: len(list(tmp_path.glob("done-*"))) == 2, "both ranks have returned")
        time.sleep(3)  # the results are received
        running.kill(signal.SIGINT)
        done = wait_for_end(running, time.monotonic())
    assert done.code == 130, done.err
    require_bounded(done.err)
    record_fault(THREAD, "exit code 130")
