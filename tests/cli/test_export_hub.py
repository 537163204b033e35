"""`samestep export --hub` writes and uploads the model that the evaluations of a run belong to."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from helpers.run_folders import CERTIFICATE
from helpers.system import here
from samestep.errors import EXIT_DONE, EXIT_FAILED, EXIT_INPUT
from samestep.recipes.yaml_text import from_yaml

pytestmark = pytest.mark.slow
SMALL = ("epochs=1", "model.options.width=8", "batch_size=128", "ema.decay=0.9")
WEIGHTS = "model.safetensors"
HUB = ("--hub", "me/digits")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averaged weights."""
    place = tmp_path_factory.mktemp("push")
    assert here("train", "digits", "--name", "a", *SMALL, cwd=place) == EXIT_DONE
    return place


class Hub(ThreadingHTTPServer):
    """The requests of the Hub that an upload needs; a token other than `right` has no access."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.repositories: list[dict[str, Any]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        result: dict[str, Any] = {}
        if self.path.endswith("/repos/create"):
            self.server.repositories.append(json.loads(body))
            result = {"url": f"{self.server.address}/me/digits"}
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            result = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            result = {"commitUrl": f"{self.server.address}/me/digits/commit/1", "commitOid": "1"}
        self._answer(result)

    def do_GET(self) -> None:
        self._answer({"id": "me/digits", "sha": "0", "siblings": []})

    def _answer(self, result: dict[str, Any]) -> None:
        self.send_response(200 if self.headers.get("Authorization") == "Bearer right" else 401)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(result).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def push(place: Path, *arguments: str, address: str, token: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: the client reads the address when it is imported.
    command = ["env", f"HF_ENDPOINT={address}", f"HF_TOKEN={token}", sys.executable, "-m", "samestep", "export"]
    return subprocess.run([*command, *arguments], cwd=place, capture_output=True, text=True, timeout=100, check=False)


def test_card_compares_the_recipe_of_the_certificate(place: Path, tmp_path: Path) -> None:
    recipe = from_yaml((place / "runs/a/recipe.yaml").read_text(encoding="utf-8"))
    options = {**recipe["optimizer"], "options": {**recipe["optimizer"]["options"], "lr": 0.05}}
    cards = {}
    for name, value in (("same", recipe), ("other", {**recipe, "optimizer": options}), ("script", None)):
        certificate = tmp_path / f"{name}.json"
        certificate.write_text(json.dumps({**CERTIFICATE, "recipe": value}), encoding="utf-8")
        assert here("export", "runs/a", *HUB, "--out", tmp_path / name, "--certificate", certificate, cwd=place) == 0
        cards[name] = (tmp_path / name / "README.md").read_text(encoding="utf-8")
    assert "differs" not in cards["same"]
    assert "script" not in cards["same"]
    assert "differs from that of these weights: `optimizer.options.lr" in cards["other"]
    assert "belongs to a script" in cards["script"]


def test_files_are_those_of_the_evaluated_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "certificate.json").write_text(json.dumps({**CERTIFICATE, "arguments": ["epochs=1"]}))
    command = ("export", "runs/a", *HUB, "--out", "out", "--certificate", "certificate.json", "--json")
    assert here(*command, cwd=place) == EXIT_DONE
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {path.name for path in (place / "out").iterdir()} == {
        *("README.md", WEIGHTS, "recipe.yaml", "data.json", "certificate.json")
    }
    assert result["sha256"] == sha256((place / "out" / WEIGHTS).read_bytes()).hexdigest()
    card = (place / "out" / "README.md").read_text()
    assert result["sha256"] in card
    assert "the comparisons of `samestep verify` with `digits epochs=1` hold." in card
    checkpoint = place / "runs/a/checkpoints/best"
    expected = load_file(checkpoint / WEIGHTS) | load_file(checkpoint / "average.safetensors")
    written = load_file(place / "out" / WEIGHTS)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert here("eval", "out/recipe.yaml", "--pretrained", f"out/{WEIGHTS}", "--json", cwd=place) == EXIT_DONE
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: values[name] for name in result["metrics"]} == result["metrics"]
    assert here(*command, cwd=place) == EXIT_INPUT  # the folder exists


def test_upload(place: Path, hub: Hub) -> None:
    done = push(place, "runs/a", *HUB, address=hub.address, token="right")
    assert done.returncode == EXIT_DONE, done.stderr
    assert hub.files.keys() == {"README.md", WEIGHTS, "recipe.yaml", "data.json"}
    assert load(hub.files[WEIGHTS]).keys() == load_file(place / "runs/a/checkpoints/best" / WEIGHTS).keys()
    assert hub.repositories[0]["name"] == "digits"


@pytest.mark.parametrize(("name", "token"), [("me/digits", "wrong"), ("me/di gits", "right")])
def test_refused_upload(place: Path, hub: Hub, name: str, token: str) -> None:
    done = push(place, "runs/a", "--hub", name, address=hub.address, token=token)
    assert done.returncode == EXIT_FAILED
    assert "[E_IO]" in done.stderr
    assert not hub.files


@pytest.mark.parametrize(
    "arguments",
    [
        ("runs/a", "--certificate", "c.json"),
        ("runs/none", *HUB, "--out", "other"),
        ("runs/a", *HUB, "--out", "other", "--format", "onnx"),
    ],
)
def test_invalid_arguments(place: Path, arguments: tuple[str, ...]) -> None:
    assert here("export", *arguments, cwd=place) == EXIT_INPUT
    assert not (place / "other").exists()
