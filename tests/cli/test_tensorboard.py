"""Curves of a run in TensorBoard."""

import json
import os
import re
import shlex
import subprocess
import urllib.request
from pathlib import Path

import pytest

from helpers.system import events, here, until

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"


@pytest.mark.slow
def test_the_printed_command_shows_the_curves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also without the programs of the environment on PATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.defpath)
        assert here("train", RECIPE, "--name", "a", "--set", "epochs=1", cwd=tmp_path) == 0
    (command,) = re.findall(r"^curves +(.*)$", capfd.readouterr().out, re.MULTILINE)
    expected = [(event["step"], pytest.approx(event["loss"])) for event in events(tmp_path / "runs" / "a", "step")]
    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as file:
        server = subprocess.Popen([*shlex.split(command), "--port", "0"], cwd=tmp_path, stdout=file, stderr=file)
    try:
        pattern = re.compile(r" at (http://localhost:\d+/)")
        until(lambda: pattern.search(log.read_text(encoding="utf-8")), "the address of TensorBoard", 60)
        (address,) = pattern.findall(log.read_text(encoding="utf-8"))
        url = f"{address}data/plugin/scalars/scalars?run=.&tag=train%2Floss"
        until(lambda: len(json.loads(read_url(url) or b"[]")) == len(expected), "the curve", 30)
        points = json.loads(read_url(url) or b"[]")
    finally:
        server.kill()
        server.wait()
    assert [(step, loss) for _, step, loss in points] == expected


def read_url(url: str) -> bytes | None:
    """Return the content, or None if there is none yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            content: bytes = response.read()
            return content
    except OSError:  # not ready
        return None
