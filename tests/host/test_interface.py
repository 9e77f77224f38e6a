"""`choose_address`: the network address that the ranks of a host use."""

import psutil
import pytest

from taas_magic.host.system import (
    LOOPBACK,
    address_of,
    choose_address,
    interface_name,
    local_address_to,
)


def test_names_and_addresses_of_interfaces() -> None:
    loopback = interface_name(LOOPBACK)
    assert loopback in psutil.net_if_addrs()
    assert address_of(loopback) == LOOPBACK
    assert interface_name("192.0.2.1") == address_of("nonesuch0") == ""


def test_the_settings_come_first_as_a_name_or_an_address() -> None:
    reached = {"SSH_CONNECTION": "192.0.2.7 1000 192.0.2.1 22"}
    assert choose_address(interface_name(LOOPBACK), reached, "192.0.2.1") == LOOPBACK
    assert choose_address(LOOPBACK, reached, "192.0.2.1") == LOOPBACK


def test_an_interface_that_is_not_here_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        ValueError, match=f"no network interface 'ib9'; it has .*{interface_name(LOOPBACK)}"
    ):
        choose_address("ib9", {}, LOOPBACK)


def test_then_where_the_host_was_reached() -> None:
    assert (
        choose_address("", {"SSH_CONNECTION": f"127.0.0.1 1 {LOOPBACK} 22"}, "192.0.2.1")
        == LOOPBACK
    )


@pytest.mark.parametrize("said", ["", "nonsense", "10.0.0.1 1 192.0.2.1 22"])
def test_then_the_route_to_the_scheduler(said: str) -> None:
    """A batch job inherits SSH_CONNECTION from another host, the one where it was submitted."""
    assert (
        choose_address("", {"SSH_CONNECTION": said}, LOOPBACK)
        == local_address_to(LOOPBACK)
        == LOOPBACK
    )
