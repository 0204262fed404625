"""The address at which a node listens: that of a named interface, or of the interface that leads to the rendezvous.

Nothing between nodes is encrypted or authenticated. So a node listens at one address, never at all of them, and at a public
address only if the user says that its network is trusted.
"""

import ipaddress
import socket

import psutil

from fastps.errors import AttachError, UsageError

_TRUSTED = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("127.0.0.0/8", "::1/128"),  # loopback
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),  # private (RFC 1918, RFC 4193)
        *("169.254.0.0/16", "fe80::/10"),  # link-local
        "100.64.0.0/10",  # shared by the customers of one provider (RFC 6598); VPNs such as Tailscale use it
    )
)


def own_address(host: str, port: int, interface: str = "", trusts_network: bool = False) -> str:
    """The address at which this node listens: of an interface by its name or address, or of the one that leads to a rendezvous.

    Raises UsageError for an interface that this machine does not have, and unless `trusts_network` for a public address of one
    that is not named; AttachError if no interface leads to the rendezvous.

    >>> own_address("127.0.0.1", 29400)
    '127.0.0.1'
    """
    if interface:
        return _address_of(interface, host, port)
    found = address_towards(host, port)
    if not (trusts_network or is_trusted(found)):
        raise UsageError(
            f"the interface that leads to {host} has the public address {found}, and nothing between nodes is encrypted or"
            " authenticated: expected a loopback, private or link-local address; name the interface of a private network or"
            " a VPN (--interface, FASTPS_INTERFACE), or give --trusted-network (FASTPS_TRUSTED_NETWORK=1) if a firewall keeps"
            " strangers out"
        )
    return found


def is_trusted(address: str) -> bool:
    """Whether an address is loopback, private, link-local or shared by the customers of one provider.

    >>> is_trusted("192.168.1.7"), is_trusted("fe80::1%eth0"), is_trusted("8.8.8.8")
    (True, True, False)
    """
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return any((mapped or found) in network for network in _TRUSTED)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(address).is_loopback


def address_towards(host: str, port: int) -> str:
    """The address of this machine's interface that leads to a host. Sends nothing. Raises AttachError.

    >>> address_towards("127.0.0.1", 29400)
    '127.0.0.1'
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AttachError(
            f"expected a network interface that leads to {host}, found none ({error}); check the host's name and the network"
        ) from error


def _address_of(interface: str, host: str, port: int) -> str:
    """The address of a named interface, of the rendezvous' family. Raises UsageError that lists what this machine has."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise AttachError(
            f"expected {host} to be the name or an address of node 0, found none of that name ({error})"
        ) from error
    named = {
        name: [each.address for each in addresses if each.family == family] for name, addresses in psutil.net_if_addrs().items()
    }
    chosen = named.get(interface) or [each for found in named.values() for each in found if each == interface]
    if not chosen:
        there = "; ".join(f"{name}: {', '.join(found)}" for name, found in sorted(named.items()) if found)
        kind = "IPv6" if family == socket.AF_INET6 else "IPv4"
        raise UsageError(
            f"--interface (FASTPS_INTERFACE): expected the name or the address of an interface with {kind}, as {host} has,"
            f" found {interface!r}; this machine has {there}"
        )
    found = str(chosen[0])
    if not _leads_to(found, family, host, port):
        raise UsageError(
            f"--interface (FASTPS_INTERFACE): expected an interface from which {host} can be reached, found {interface}"
            f" ({found}); name another, or give the rendezvous an address of that interface's network"
        )
    return found


def _leads_to(address: str, family: int, host: str, port: int) -> bool:
    """Whether the kernel has a route to a host that begins at an address. Sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_DGRAM)[0][4])
            probe.connect(socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4])
        return True
    except OSError:
        return False


def is_here(host: str) -> bool:
    """Whether a host's name or address belongs to this machine.

    >>> is_here("localhost")
    True
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
        return True
    except OSError:
        return False
