"""The network between the workers of different nodes, for libraries that do not find it by themselves."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from framework.launch.elastic.links import interface_of, is_loopback, own_addresses
from framework.launch.elastic.membership import Member
from framework.runtime.environment import node_name, variables
from framework.runtime.lock import process_identity
from framework.runtime.problem import Problem

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Network:
    """This node's networks, and the libraries' variables that the user has set."""

    addresses: list[str]
    machine: str  # nodes on the same machine reach each other over loopback
    given: tuple[str, ...]

    @classmethod
    def find(cls) -> "Network":
        given = tuple(name for name in _VARIABLES if variables().get(name))
        gloos = variables().get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        machine = node_name()
        with suppress(OSError):
            machine = f"{process_identity().get('boot')} {os.readlink('/proc/self/ns/net')}"
        return cls(own_addresses(gloos or None), machine, given)

    def fault(self, nodes: Iterable[Member]) -> str | None:
        """Return why no other host can reach this host, if there are other hosts. Return None if no reason is known."""
        others = [node.host for node in nodes if node.machine != self.machine]
        if not others or not all(map(is_loopback, self.addresses)):
            return None
        chosen = f"GLOO_SOCKET_IFNAME={variables()['GLOO_SOCKET_IFNAME']}" if self.given else "this host's only network"
        better = [interface_of(address) for address in own_addresses() if not is_loopback(address)]
        cure = f"GLOO_SOCKET_IFNAME={better[0]}" if better else "a network that all hosts are on"
        return str(Problem("launch.nnodes", f"{chosen} belongs to {node_name()} alone, and {others[0]} is another host", cure))

    def towards(self, host: str) -> str | None:
        """Return the interface for connections to `host`. Return None if `host` is a loopback name of this machine."""
        with suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # with UDP, this sends nothing
                own = str(probe.getsockname()[0])
            if not is_loopback(own):
                return interface_of(own)
            if is_loopback(host) or host == "localhost":
                return None
        reached = [address for address in self.addresses if not is_loopback(address)]  # `host` is another name of this machine
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
