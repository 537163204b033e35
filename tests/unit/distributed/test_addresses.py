"""Addresses: sockets that listen."""

import socket

import pytest

from samestep.distributed.addresses import free_loopback_socket, listen
from samestep.errors import InputError


def test_rank_0listens_on_its_address_only() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_address_of_another_machine_means_all_interfaces() -> None:
    with listen("192.0.2.77", 0) as listener:  # RFC 5737: reserved for documentation
        assert listener.getsockname()[0] == "0.0.0.0"


def test_host_name_with_a_loopback_address_means_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **named: results)
    with listen("this-host", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} at 127.0.0.1 is used") as caught:
            listen("127.0.0.1", port)
    assert "MASTER_PORT" in str(caught.value)


def test_socket_listens_on_loopback_only() -> None:
    with free_loopback_socket() as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        assert port > 0
