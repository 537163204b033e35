"""Port file of rank 0."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.distributed.port_file import publish_port, wait_for_port
from samestep.errors import InputError, RunError

PUBLISH = """
import sys, time
from pathlib import Path
from samestep.distributed.port_file import publish_port
with publish_port("job", 1234, Path(sys.argv[1])):
    print("published", flush=True)
    time.sleep(60)
"""


def test_port_is_readable_while_published(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    with publish_port("slurm-1.0-0", 1234, folder):
        assert wait_for_port("slurm-1.0-0", 0, folder) == 1234
        (path,) = folder.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(RunError, match="no port"):
            wait_for_port("slurm-1.1-0", 0, folder)
    assert list(folder.iterdir()) == []


def test_port_file_of_a_killed_rank_is_ignored_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    publisher = subprocess.Popen([sys.executable, "-c", PUBLISH, str(folder)], stdout=subprocess.PIPE, text=True)
    with publisher:
        assert publisher.stdout is not None
        publisher.stdout.readline()
        assert wait_for_port("job", 0, folder) == 1234
        publisher.kill()
    assert [path.name for path in folder.iterdir()] == ["job.port"]
    with pytest.raises(RunError, match=r"no port in .*job.port within 0 s") as caught:
        wait_for_port("job", 0, folder)
    assert "MASTER_PORT" in str(caught.value)
    with publish_port("job", 4321, folder):
        assert wait_for_port("job", 0, folder) == 4321


def test_job_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    with publish_port("../a b/c", 1, tmp_path / "ports"):
        (path,) = (tmp_path / "ports").iterdir()
        assert path.name == ".._a_b_c.port"


def test_folder_open_to_other_users_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(InputError) as caught:
        wait_for_port("job", 0, folder)
    assert caught.value.code == "E_PORT_FOLDER"
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    with pytest.raises(InputError) as caught:
        wait_for_port("job", 0, link)
    assert caught.value.code == "E_PORT_FOLDER"
