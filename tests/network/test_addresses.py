"""The address at which a node listens: by default the one that leads to the rendezvous, and no public one unasked."""

import shutil
import subprocess
import sys

import pytest

from fastps.errors import AttachError, UsageError
from fastps.network.addresses import address_towards, is_here, is_loopback, is_trusted, own_address


@pytest.mark.parametrize(("address", "trusted"), [
    *(("127.0.0.1", True), ("10.1.2.3", True), ("172.16.0.1", True), ("172.31.255.255", True), ("192.168.0.9", True)),
    *(("169.254.3.4", True), ("100.64.0.1", True), ("100.127.255.255", True), ("::1", True), ("fd00::1", True)),
    *(("fe80::1%eth0", True), ("::ffff:10.0.0.1", True)),
    *(("172.32.0.1", False), ("100.128.0.1", False), ("8.8.8.8", False), ("192.169.0.1", False), ("2001:db8::1", False)),
    ("::ffff:8.8.8.8", False),
])  # fmt: skip
def test_private_addresses_are_trusted_and_public_ones_are_not(address: str, trusted: bool) -> None:
    assert is_trusted(address) is trusted


def test_an_interface_is_found_by_its_name_and_by_its_address() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert own_address("127.0.0.5", 1, "lo") == "127.0.0.1"
    assert own_address("127.0.0.5", 1, "127.0.0.1") == "127.0.0.1"


def test_an_interface_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"found 'eth77'; this machine has .*lo: 127\.0\.0\.1"):
        own_address("127.0.0.1", 1, "eth77")


def test_an_interface_from_which_the_host_is_out_of_reach_is_refused() -> None:
    with pytest.raises(UsageError, match=r"from which 10\.9\.8\.7 can be reached, found lo \(127\.0\.0\.1\)"):
        own_address("10.9.8.7", 1, "lo")


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(AttachError, match=r"leads to no-such-host\.invalid, found none"):
        address_towards("no-such-host.invalid", 1)
    with pytest.raises(AttachError, match="found none of that name"):
        own_address("no-such-host.invalid", 1, "lo")
    assert not is_here("no-such-host.invalid")
    assert is_here("127.0.0.1") and not is_here("192.0.2.1")
    assert is_loopback("127.0.1.1") and is_loopback("::1") and not is_loopback("10.0.0.1")


def test_a_public_address_needs_a_trusted_network_or_a_named_interface() -> None:
    """In a network namespace of its own, whose loopback interface has a public address."""
    program = (
        "from fastps.network.addresses import own_address\n"
        "from fastps.errors import UsageError\n"
        "try:\n    own_address('8.8.8.8', 1)\nexcept UsageError as error:\n    print(error)\n"
        "print(own_address('8.8.8.8', 1, trusts_network=True))\n"
        "print(own_address('8.8.8.8', 1, '8.8.8.8'))\n"
    )
    setup = 'ip link set lo up && ip address add 8.8.8.8/32 dev lo && exec "$0" -c "$1"'
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not allowed here")
    ended = subprocess.run(["unshare", "-n", "sh", "-c", setup, sys.executable, program], capture_output=True, text=True)
    lines = ended.stdout.splitlines()
    assert "8.8.8.8" in lines[0] and "or give --trusted-network" in lines[0], ended
    assert lines[1:] == ["8.8.8.8", "8.8.8.8"]
