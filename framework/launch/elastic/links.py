"""The links between the nodes of an elastic run, and the network of each. Each agent asks all other agents every second."""

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import psutil

Address = tuple[str, int]

LOST_AFTER_S = 8.0  # without an answer: less than the default of `launch.timeout_s`, more than TCP needs to send again
DOUBTFUL_AFTER_S = 3.0  # a round starts only with nodes that have answered recently
_PING_S = 1.0
_CONNECT_S = 3.0
_MOST_BYTES = 1024  # per line: anybody may send lines
_FAULTS = (OSError, asyncio.TimeoutError, ValueError, EOFError)


def own_addresses(interface: str | None = None) -> list[str]:
    """Return this node's addresses, one network after the other, loopback last. With `interface`, return only its addresses.

    Other nodes on the same machine may be reachable over loopback. A node's answer shows whether an address is another
    machine's.
    """
    found: list[str] = []
    with suppress(OSError):  # first the addresses of the host's name, which libraries use
        found = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    own = [entry.address for name, entries in psutil.net_if_addrs().items() for entry in entries
           if entry.family in (socket.AF_INET, socket.AF_INET6) and interface in (None, name)
           and not entry.address.startswith("fe80:")]  # fmt: skip
    ordered = [address for address in dict.fromkeys(found) if address in own] + own
    return sorted(dict.fromkeys(ordered), key=is_loopback)


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, or None."""
    owners = [name for name, entries in psutil.net_if_addrs().items() for entry in entries if entry.address == address]
    return owners[0] if owners else None


class Links:
    """One agent's connections to the other agents, in a separate thread. `close` ends them.

    It listens on this node's addresses, on one of `ports` if ports are given. A line that does not begin with the run's secret
    ends its connection.
    """

    def __init__(self, addresses: Sequence[str], *, ports: Iterable[int] = (0,)) -> None:
        self.addresses: list[Address] = []  # the addresses on which it listens
        self._others: dict[int, list[Address]] = {}
        self._heard: dict[int, float] = {}  # for each other node: the time of its last answer
        self._local: dict[int, str] = {}  # for each other node: this node's address of the connection
        self._number, self._secret = 0, ""
        self._closed = threading.Event()
        ready = threading.Event()
        run = self._run(list(addresses), list(ports), ready)
        self._thread = threading.Thread(target=asyncio.run, args=(run,), name="links", daemon=True)
        self._thread.start()
        ready.wait()

    def meet(self, others: Mapping[int, Sequence[Address]], *, number: int, secret: str) -> None:
        """Keep connections to these nodes, by their numbers. `number` is this node's number. The call does not wait."""
        self._number, self._secret = number, secret
        self._others = {other: list(addresses) for other, addresses in others.items() if other != number}

    def answering(self, *, within_s: float) -> list[int]:
        """Return the nodes that have answered within this number of seconds."""
        now = time.monotonic()
        return sorted(number for number, heard in list(self._heard.items()) if now - heard < within_s)

    def address(self, others: Iterable[int]) -> str | None:
        """Return this node's address over which most of the others answer, or None if no node answers."""
        used = Counter(address for number in others if (address := self._local.get(number)) is not None)
        return used.most_common(1)[0][0] if used else None

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2 * _CONNECT_S)

    async def _run(self, addresses: list[str], ports: list[int], ready: threading.Event) -> None:
        servers = [server for address in addresses if (server := await self._listen(address, ports)) is not None]
        self.addresses = [socket.getsockname()[:2] for server in servers for socket in server.sockets]
        ready.set()
        talks: dict[int, asyncio.Task[None]] = {}
        while not self._closed.is_set():
            for number in self._others.keys() - talks.keys():
                talks[number] = asyncio.create_task(self._keep(number))
            for number in talks.keys() - self._others.keys():
                talks.pop(number).cancel()
            await asyncio.sleep(0.1)
        for server in servers:
            server.close()

    async def _listen(self, address: str, ports: list[int]) -> asyncio.Server | None:
        for port in ports:
            with suppress(OSError):
                return await asyncio.start_server(self._answer, address, port, limit=_MOST_BYTES)
        return None

    async def _keep(self, number: int) -> None:
        while True:
            for address in self._others.get(number, []):
                with suppress(*_FAULTS):
                    await self._talk(number, address)
            await asyncio.sleep(_PING_S / 4)

    async def _talk(self, number: int, address: Address) -> None:
        """Ask a node every second whether it lives, until it does not answer. The address may belong to another process."""
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address, limit=_MOST_BYTES), _CONNECT_S)
        try:
            while True:
                writer.write(f"{self._secret} {number}\n".encode())
                if await asyncio.wait_for(reader.readline(), LOST_AFTER_S) != f"{self._secret} {number} is here\n".encode():
                    raise EOFError
                self._heard[number] = time.monotonic()
                self._local[number] = writer.get_extra_info("sockname")[0]
                await asyncio.sleep(_PING_S)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await asyncio.wait_for(reader.readline(), LOST_AFTER_S) == f"{self._secret} {self._number}\n".encode():
                if not self._secret:
                    break
                writer.write(f"{self._secret} {self._number} is here\n".encode())
                await writer.drain()
        except (*_FAULTS, asyncio.CancelledError):  # cancelled at the agent's end; asyncio would print it
            pass
        finally:
            writer.close()
