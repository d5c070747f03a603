"""The network over which a node's workers reach those of the others, for the libraries that do not look for it themselves."""

import os
from contextlib import suppress
from dataclasses import dataclass

from framework.launch.elastic.links import own_addresses
from framework.runtime.environment import node_name, variables
from framework.runtime.lock import process_identity

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

    def use(self, interface: str | None) -> None:
        """Have the workers that start next listen on an interface, where the user has chosen none; None: as if alone."""
        for name in _VARIABLES:
            if name in self.given:
                continue
            if interface is None:
                variables().pop(name, None)
            else:
                variables()[name] = interface
