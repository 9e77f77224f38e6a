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


def test_the_interface_in_the_settings_has_priority() -> None:
    reached = {"SSH_CONNECTION": "192.0.2.7 1000 192.0.2.1 22"}
    assert choose_address(interface_name(LOOPBACK), reached, "192.0.2.1") == LOOPBACK
    assert choose_address(LOOPBACK, reached, "192.0.2.1") == LOOPBACK


def test_an_unknown_interface_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(
        ValueError, match=f"no network interface 'ib9'; it has .*{interface_name(LOOPBACK)}"
    ):
        choose_address("ib9", {}, LOOPBACK)


def test_without_settings_the_address_is_that_by_which_ssh_reached_the_host() -> None:
    assert (
        choose_address("", {"SSH_CONNECTION": f"127.0.0.1 1 {LOOPBACK} 22"}, "192.0.2.1")
        == LOOPBACK
    )


@pytest.mark.parametrize("said", ["", "nonsense", "10.0.0.1 1 192.0.2.1 22"])
def test_without_settings_and_ssh_the_address_is_that_of_the_route_to_the_scheduler(
    said: str,
) -> None:
    """A batch job inherits SSH_CONNECTION from another host, the one where it was submitted."""
    assert (
        choose_address("", {"SSH_CONNECTION": said}, LOOPBACK)
        == local_address_to(LOOPBACK)
        == LOOPBACK
    )
