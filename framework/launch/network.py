"""The networks of this node, for libraries that do not find the network between the workers by themselves."""

import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from framework.runtime.environment import variables

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def own_addresses(interface: str | None = None) -> list[str]:
    """Return this node's addresses, one network after the other, loopback last. With `interface`, return only its addresses.

    Other nodes on the same machine may be reachable over loopback.
    """
    found: list[str] = []
    with suppress(OSError):  # first the addresses of the host's name, which libraries use
        found = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    own = [entry.address for name, entries in psutil.net_if_addrs().items() for entry in entries
           if entry.family in (socket.AF_INET, socket.AF_INET6) and interface in (None, name)
           and not entry.address.startswith("fe80:")]  # fmt: skip
    ordered = [address for address in dict.fromkeys(found) if address in own] + own
    return sorted(dict.fromkeys(ordered), key=_is_loopback)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, or None."""
    owners = [name for name, entries in psutil.net_if_addrs().items() for entry in entries if entry.address == address]
    return owners[0] if owners else None


@dataclass(frozen=True)
class Network:
    """This node's networks, and the libraries' variables that the user has set."""

    addresses: list[str]
    given: tuple[str, ...]

    @classmethod
    def find(cls) -> "Network":
        given = tuple(name for name in _VARIABLES if variables().get(name))
        gloos = variables().get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        return cls(own_addresses(gloos or None), given)

    @property
    def given_address(self) -> str | None:
        """The address of the interface that the user has chosen, or None."""
        return self.addresses[0] if "GLOO_SOCKET_IFNAME" in self.given and self.addresses else None

    def towards(self, host: str) -> str | None:
        """Return the interface for connections to `host`. Return None if `host` is a loopback name of this machine."""
        with suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # with UDP, this sends nothing
                own = str(probe.getsockname()[0])
            if not _is_loopback(own):
                return interface_of(own)
            if _is_loopback(host) or host == "localhost":
                return None
        reached = [address for address in self.addresses if not _is_loopback(address)]  # `host` is another name of this machine
        return interface_of(reached[0]) if reached else None

    def use(self, interface: str | None, *, libraries: Iterable[str] = _VARIABLES) -> None:
        """Make the next workers listen on an interface, unless the user has chosen one. None: remove this choice."""
        for name in libraries:
            if name in self.given:
                continue
            if interface is None:
                variables().pop(name, None)
            else:
                variables()[name] = interface
