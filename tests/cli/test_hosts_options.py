"""`--hosts`, `--host-rank` and `--port`: combinations that are refused before a connection."""

from pathlib import Path

import pytest

from helpers.system import here

BOTH = ("--hosts", "node-0,node-1", "--host-rank", 1)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--host-rank", 1), "E_OPTION_CONFLICT"),
        (("--port", 29500), "E_OPTION_CONFLICT"),
        (("--hosts", "node-0,node-1"), "E_OPTION_CONFLICT"),
        ((*BOTH, "--max-restarts", 1), "E_OPTION_CONFLICT"),
        ((*BOTH, "--processes", "1:2"), "E_OPTION_CONFLICT"),
        ((*BOTH, "--accumulate", 2), "E_OPTION_CONFLICT"),
        ((*BOTH, "--per-device-batch-size", 2), "E_OPTION_CONFLICT"),
        (("--hosts", "node-0,node-0", "--host-rank", 1), "E_HOSTS"),
        (("--hosts", "node-0,node-1", "--host-rank", 2), "E_HOSTS"),
        ((*BOTH, "--port", 0), "E_HOSTS"),
        (("--hosts", "no-such-host.invalid,node-1", "--host-rank", 1), "E_UNKNOWN_HOST"),
    ],
)
def test_invalid_combinations(
    options: tuple[object, ...], code: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("train", "digits", *options, cwd=tmp_path) == 2
    assert f"[{code}]" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_another_launcher_excludes_hosts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert here("train", "digits", *BOTH, cwd=tmp_path) == 2
    assert "--hosts, but torchrun has started this process [E_OPTION_CONFLICT]" in capfd.readouterr().err
