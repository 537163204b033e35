"""Slurm's compressed lists of hosts."""

import pytest

from samestep.errors import InputError
from samestep.runtime.host_list import count_hosts, first_host


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("gpu[9,003-006]", "gpu9"),
        ("login1,gpu[003-006]", "login1"),
        ("rack[01-02]n[3,5]-ib", "rack01n3-ib"),
        ("node-a.example.org", "node-a.example.org"),
        ("a[0]", "a0"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("hosts", "count"),
    [
        ("n1", 1),
        ("n1,n2", 2),
        ("gpu[003-006,9],login1", 6),
        ("rack[01-02]n[3,5]-ib", 4),
        ("node-a.example.org", 1),
        ("", 0),
    ],
)
def test_number_of_hosts(hosts: str, count: int) -> None:
    assert count_hosts(hosts) == count


@pytest.mark.parametrize("hosts", [",n1", "gpu[003-006", "gpu]3", "[]", "gpu[a-b]", "n1,gpu[1-]", "tux[0-8:2]", "a b"])
def test_what_is_no_list_is_not_counted(hosts: str) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        count_hosts(hosts)


@pytest.mark.parametrize("hosts", ["", ",n1", "gpu[003-006", "gpu]3", "[]", "gpu[a-b]", "gpu[1-]", "tux[0-8:2]", "a b"])
def test_what_is_no_list_is_refused(hosts: str) -> None:
    with pytest.raises(InputError, match="cannot be read") as caught:
        first_host(hosts)
    assert "MASTER_ADDR" in str(caught.value)
