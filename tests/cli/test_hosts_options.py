"""`--hosts`, `--host-rank` and `--port`: refused combinations, and stop requests before all hosts have arrived."""

import signal
import socket
from pathlib import Path

import pytest

from helpers.started import free_port
from helpers.system import Done, Running, here

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


def require_stopped(running: Running, path: Path, number: signal.Signals) -> Done:
    """Send a signal to a command that waits for other hosts, and require its end."""
    running.kill(number)
    done = running.wait(10)
    assert done.code == 130, done
    assert f"error: stopped by {number.name} while the hosts waited for one another [E_STOPPED]" in done.err, done
    assert len(done.err.splitlines()) <= 3, done
    assert not list(path.iterdir())
    return done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_first_host_stops_while_it_waits(number: signal.Signals, tmp_path: Path) -> None:
    port = free_port()
    options = ("--hosts", "127.0.0.1,127.0.0.2", "--host-rank", 0, "--port", port)
    with Running("train", "digits", *options, cwd=tmp_path) as running:

        def is_waiting() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        running.until(is_waiting, "the first host listens")
        require_stopped(running, tmp_path, number)


def test_other_host_stops_while_it_waits(tmp_path: Path) -> None:
    """The connection to the first host ends with the request to stop."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        first.settimeout(30)
        options = ("--hosts", "127.0.0.1,127.0.0.2", "--host-rank", 1, "--port", first.getsockname()[1])
        with Running("train", "digits", *options, cwd=tmp_path) as running:
            connection, _ = first.accept()
            with connection, connection.makefile("rb") as lines:
                assert b"hello" in lines.readline()
                require_stopped(running, tmp_path, signal.SIGTERM)
                assert any(b"stop" in line for line in lines)
