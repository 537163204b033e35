"""A port that rank 0 publishes to the ranks on its machine."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.errors import InputError, RunError
from samestep.runtime.port_file import free_loopback_socket, published, wait_for_port

HOLD = """
import sys, time
from pathlib import Path
from samestep.runtime.port_file import published
with published("job", 1234, Path(sys.argv[1])):
    print("there", flush=True)
    time.sleep(60)
"""


def test_the_port_is_read_while_it_is_published(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    with published("slurm-1.0-0", 1234, folder):
        assert wait_for_port("slurm-1.0-0", 0, folder) == 1234
        (path,) = folder.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(RunError, match="no port"):
            wait_for_port("slurm-1.1-0", 0, folder)
    assert list(folder.iterdir()) == []


def test_what_a_killed_rank_left_is_no_port_and_gives_way(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    held = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    with held:
        assert held.stdout is not None
        held.stdout.readline()
        assert wait_for_port("job", 0, folder) == 1234
        held.kill()
    assert [path.name for path in folder.iterdir()] == ["job.port"]
    with pytest.raises(RunError, match=r"no port in .*job.port within 0 s") as caught:
        wait_for_port("job", 0, folder)
    assert "MASTER_PORT" in str(caught.value)
    with published("job", 4321, folder):
        assert wait_for_port("job", 0, folder) == 4321


def test_the_name_of_a_job_cannot_lead_elsewhere(tmp_path: Path) -> None:
    with published("../a b/c", 1, tmp_path / "ports"):
        (path,) = (tmp_path / "ports").iterdir()
        assert path.name == ".._a_b_c.port"


def test_a_folder_that_others_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(InputError, match="only this user can enter"):
        wait_for_port("job", 0, folder)
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    with pytest.raises(InputError, match="only this user can enter"):
        wait_for_port("job", 0, link)


def test_the_socket_is_for_this_machine_alone() -> None:
    with free_loopback_socket() as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        assert port > 0
