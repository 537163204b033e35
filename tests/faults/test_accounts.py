"""Accounts without a home folder, names with markup, terminals without Unicode, signals that repeat."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.hostile import controls
from helpers.machines import in_shell
from helpers.surroundings import RecordFault, require_bounded, require_single_report
from helpers.system import TESTS, Running, environment, here, last_saved
from samestep.distributed.env import library_caches, state_folder
from samestep.distributed.logging import plain_console
from samestep.errors import InputError
from samestep.report_text import printable

RECIPE = TESTS / "helpers/recorded.yaml"
UNSET = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
UNKNOWN = "--user --map-user=54321 --map-group=54321"
CHECKS = """
import getpass, json, os
from samestep.distributed.env import library_caches, state_folder
from samestep.errors import InputError
assert os.path.expanduser("~") == "~"
found = {}
try:
    found["state"] = str(state_folder())
except InputError as error:
    found["state"] = error.code + str(error)
import matplotlib, rich.console, torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
found["caches"] = library_caches("/tmp")
default_cache_dir()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_account_without_an_entry_and_a_home(tmp_path: Path, record_fault: RecordFault) -> None:
    tmp_path.chmod(0o777)
    variables = {name: value for name, value in environment().items() if name not in UNSET}
    command = in_shell("true", unshare=UNKNOWN)
    shell = [*command[: command.index("bash")], sys.executable]
    done = subprocess.run(
        [*shell, "-c", CHECKS], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["state"].startswith("E_MACHINE")
    assert "HOME" in found["state"]
    assert all(path.startswith("/") for path in found["caches"])
    unset = in_shell("unset HOME XDG_STATE_HOME XDG_CACHE_HOME", unshare=UNKNOWN)
    with Running("train", RECIPE, "--name", "a", "epochs=1", cwd=tmp_path, command=unset) as running:
        done_training = running.wait(200)
    assert done_training.code == 0, done_training.err
    assert "HOME" in done_training.err
    with Running("eval", "runs/a", cwd=tmp_path, command=unset) as running:
        require_single_report(running.wait(200), 2)
    record_fault("no HOME and no entry in passwd: train", "exit code 0; not trusted later")
    record_fault("no HOME and no entry in passwd: eval of this run", "exit code 2; E_UNTRUSTED")


@pytest.mark.parametrize("home", ["relative", ".", "../x"])
def test_relative_home_is_none(home: str, monkeypatch: pytest.MonkeyPatch, record_fault: RecordFault) -> None:
    """A folder below the current one could be that of a stranger."""
    monkeypatch.setenv("HOME", home)
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError) as caught:
        state_folder()
    assert caught.value.code == "E_MACHINE"
    assert all(os.path.isabs(path) for path in library_caches("/tmp"))
    record_fault(f"HOME is `{home}`", "no folder of this account; E_MACHINE")


# --- names ---

NAMES = {
    "a closing tag": "photos [/b]",
    "a colour": "[red]cats",
    "a year in brackets": "[2024] a",
    "an emoji": "a :smile: b",
    "a link": "[link=https://example.org]x[/link]",
    "an escape sequence": "a\x1b[2Jb",
    "OSC 8": "\x1b]8;;https://example.org\x1b\\x\x1b]8;;\x1b\\",
    "C1": "a\x9b31mb",
    "U+202E": "a\u202egnp.exe",
    "U+2028": "a\u2028error: b",
    "half a pair": "a\udce9b",
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_shown_as_they_are(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    run = tmp_path / "runs" / NAMES[kind].replace("/", "_")
    assert here("report", run, cwd=tmp_path) == 2
    assert here("train", f"{NAMES[kind]}.yaml", cwd=tmp_path) == 2
    assert here("train", "digits", f"model.options={json.dumps({NAMES[kind]: 1})}", cwd=tmp_path) == 2
    out, err = capfd.readouterr()
    require_bounded(err)
    assert not controls(out + err)
    console = plain_console(width=200)
    with console.capture() as captured:
        console.print(printable(NAMES[kind]))
    assert captured.get() == f"{printable(NAMES[kind])}\n"
    record_fault(f"{kind} in the names of folders, recipes and options", "shown as text")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_terminals_without_unicode(encoding: str, tmp_path: Path, record_fault: RecordFault) -> None:
    """One process prints what a terminal cannot show, by each way."""
    code = (
        "from samestep.distributed.standard_streams import protect_output; protect_output(stdout_seconds=None)\n"
        "from samestep.distributed.logging import plain_console\nfrom rich.table import Table\n"
        "from samestep.loggers.progress import ProgressLogger\n"
        "table = Table(); table.add_column('\u03b1'); table.add_row('\u732b [/b]'); plain_console().print(table)\n"
        "ProgressLogger().log(1, {'\u03b2': 1.0})\nprint('\u732b')\n"
    )
    variables = {**environment(), "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert "\\u732b" in done.stdout.decode(encoding)
    assert "\\u03b2" in done.stderr.decode(encoding)
    record_fault(f"a terminal with the encoding {encoding}", "other characters as escape sequences")


# --- signals that repeat ---


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.02, pytest.param(0.3, marks=pytest.mark.long)])
def test_sigterm_that_repeats(seconds: float, tmp_path: Path, record_fault: RecordFault) -> None:
    for place in ("start", "training"):
        with Running("train", RECIPE, "--name", place, "--processes", 2, cwd=tmp_path) as running:
            if place == "training":
                running.until((tmp_path / "runs/training/events.jsonl").exists, "events")
            else:
                time.sleep(1)
            began = time.monotonic()
            while running.is_running() and time.monotonic() - began < 60:
                running.kill(signal.SIGTERM)
                time.sleep(seconds)
            done = running.wait(30)
        assert done.code == 130, done.err
        assert "Traceback" not in done.err
        assert place == "start" or last_saved(tmp_path / "runs/training")
    record_fault(f"SIGTERM every {seconds} s until the end", "exit code 130")
