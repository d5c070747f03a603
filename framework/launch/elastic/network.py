"""The network over which a node's workers reach those of the others, for the libraries that do not look for it themselves."""

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

_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # of gloo, RPC and NCCL


@dataclass(frozen=True)
class Network:
    """This node's networks, and which of the libraries' variables the user has set."""

    addresses: list[str]
    machine: str  # nodes of the same machine reach each other over loopback
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
        """Return why no other host can reach this one, if there are other hosts; None if nothing speaks against it."""
        others = [node.host for node in nodes if node.machine != self.machine]
        if not others or not all(map(is_loopback, self.addresses)):
            return None
        chosen = f"GLOO_SOCKET_IFNAME={variables()['GLOO_SOCKET_IFNAME']}" if self.given else "this host's only network"
        better = [interface_of(address) for address in own_addresses() if not is_loopback(address)]
        cure = f"GLOO_SOCKET_IFNAME={better[0]}" if better else "a network that all hosts are on"
        return str(Problem("launch.nnodes", f"{chosen} is of {node_name()} alone, and {others[0]} is another host", cure))

    def towards(self, host: str) -> str | None:
        """Return the interface over which `host` is reached; None if it is this machine by a name that means loopback."""
        with suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of UDP: nothing is sent
                own = str(probe.getsockname()[0])
            if not is_loopback(own):
                return interface_of(own)
            if is_loopback(host) or host == "localhost":
                return None
        reached = [address for address in self.addresses if not is_loopback(address)]  # this is the host, by another name
        return interface_of(reached[0]) if reached else None

    def use(self, interface: str | None, *, libraries: Iterable[str] = _VARIABLES) -> None:
        """Have the workers that start next listen on an interface, where the user has chosen none; None: as if alone."""
        for name in libraries:
            if name in self.given:
                continue
            if interface is None:
                variables().pop(name, None)
            else:
                variables()[name] = interface
