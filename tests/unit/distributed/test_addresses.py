"""Addresses: sockets that listen."""

import pytest

from samestep.errors import InputError
from samestep.launcher.rendezvous import listen


def test_rank_0listens_on_its_address_only() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_address_of_another_machine_means_all_interfaces() -> None:
    with listen("192.0.2.77", 0) as listener:  # RFC 5737: reserved for documentation
        assert listener.getsockname()[0] == "0.0.0.0"


def test_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} at 127.0.0.1 is used") as caught:
            listen("127.0.0.1", port)
    assert "MASTER_PORT" in str(caught.value)
