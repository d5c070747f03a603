"""Real hosts on one machine: namespaces of network, mounts and names on a bridge. What needs them needs root."""

import ctypes
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x40000000
_PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
_BIND = 0x1000


def _sh(line: str, *, check: bool = True) -> None:
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{line}: {done.stderr}")


def _may() -> bool:
    """Return whether this process may make namespaces, bridges and rules."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "iptables", "unshare"))):
        return False
    name = f"try{os.getpid()}"
    made = [subprocess.run(line.split(), capture_output=True).returncode == 0
            for line in (f"ip link add {name} type bridge", f"ip link del {name}", "unshare -m -n -u true")]  # fmt: skip
    return all(made)


needs_hosts = pytest.mark.skipif(not _may(), reason="needs root, iproute2 and iptables (tests/install_debian.sh)")
needs_fuse = pytest.mark.skipif(
    not (_may() and shutil.which("bindfs") and os.path.exists("/dev/fuse")),
    reason="needs root, /dev/fuse and bindfs (tests/install_debian.sh)",
)


def _call(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def own_mounts() -> None:
    """Give this process mounts of its own: what it mounts is gone with it, and with its children."""
    _call(_LIBC.unshare(_NEWNS))
    _call(_LIBC.mount(b"none", b"/", None, _PRIVATE, None))


def mount_over(source: Path, target: Path) -> None:
    _call(_LIBC.mount(str(source).encode(), str(target).encode(), None, _BIND, None))


def mount_remote(folder: Path, *, cached_s: int = 0) -> None:
    """See `folder` as over a network whose locks stay on each machine, and whose attributes are old by up to `cached_s`."""
    options = f"attr_timeout={cached_s},entry_timeout={cached_s},negative_timeout=0"
    # it ends with this process: as a daemon it would keep these mounts, and itself, for ever
    subprocess.Popen(["bindfs", "-f", "-o", options, folder, folder], preexec_fn=lambda: _LIBC.prctl(1, signal.SIGKILL))
    deadline = time.monotonic() + 10
    while not os.path.ismount(folder):
        assert time.monotonic() < deadline, "bindfs has not mounted"
        time.sleep(0.01)


@dataclass
class Host:
    """A machine: `enter` in a process puts it, and all that it starts, on it."""

    number: int
    tag: str
    hosts_file: Path
    mounts: list[Callable[[], None]] = field(default_factory=list)

    @property
    def hostname(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def _space(self) -> str:
        return f"{self.tag}{self.number}"

    def make(self) -> None:
        """Make its network, with one interface on the bridge."""
        _sh(f"ip netns add {self._space}")
        _sh(f"ip link add {self._space} type veth peer name eth0 netns {self._space}")
        _sh(f"ip link set {self._space} master {self.tag}b up")
        _sh(f"ip -n {self._space} addr add {self.address}/24 dev eth0")
        _sh(f"ip -n {self._space} link set eth0 up; ip -n {self._space} link set lo up")

    def enter(self) -> None:
        _call(_LIBC.setns(os.open(f"/run/netns/{self._space}", os.O_RDONLY), _NEWNET))
        _call(_LIBC.unshare(_NEWUTS | _NEWIPC))
        own_mounts()
        name = self.hostname.encode()
        _call(_LIBC.sethostname(name, len(name)))
        mount_over(self.hosts_file, Path("/etc/hosts"))
        for mount in self.mounts:
            mount()

    # --- its network

    def down(self) -> None:
        _sh(f"ip link set {self._space} down")

    def up(self) -> None:
        _sh(f"ip link set {self._space} up")

    def drop(self) -> None:
        """Lose what comes in."""
        self._run("iptables -A INPUT -i eth0 -j DROP")

    def add_network(self, address: str) -> None:
        """Have another interface, that leads nowhere."""
        _sh(f"ip -n {self._space} link add aside0 type veth peer name aside1")
        _sh(
            f"ip -n {self._space} addr add {address}/16 dev aside0; ip -n {self._space} link set aside0 up; ip -n {self._space} link set aside1 up"
        )

    def allow_only(self, first: int, last: int) -> None:
        """Have a firewall that lets connections to some ports in, and the kernel give no others."""
        self._run("iptables -A INPUT -i eth0 -m state --state ESTABLISHED,RELATED -j ACCEPT")
        self._run(f"iptables -A INPUT -i eth0 -p tcp --dport {first}:{last} -j ACCEPT")
        self._run("iptables -A INPUT -i eth0 -p tcp -j DROP")
        self._run(f"sh -c 'echo {first} {last} > /proc/sys/net/ipv4/ip_local_port_range'")

    def _run(self, line: str) -> None:
        _sh(f"ip netns exec {self._space} {line}")

    def heal(self) -> None:
        _sh(f"ip netns exec {self._space} iptables -F")

    def remove(self) -> None:
        _sh(f"ip netns del {self._space}; ip link del {self._space}", check=False)


@contextmanager
def hosts(count: int, folder: Path, *, name: Callable[[int], str] = lambda number: f"10.77.0.{number}") -> Iterator[list[Host]]:
    """Yield so many hosts, which can reach each other. `name` gives the address that a host's own name has on it."""
    tag = f"s{uuid.uuid4().hex[:6]}"
    made = []
    try:
        _sh(f"ip link add {tag}b type bridge; ip link set {tag}b up")
        for number in range(1, count + 1):
            others = [f"10.77.0.{other} node{other}" for other in range(1, count + 1) if other != number]
            own = [f"{name(number)} node{number}"] if name(number) else []
            file = folder / f"hosts_{number}"
            file.write_text("\n".join(["127.0.0.1 localhost", *own, *others]) + "\n")
            made.append(Host(number, tag, file))
            made[-1].make()
        yield made
    finally:
        for host in made:
            host.remove()
        _sh(f"ip link del {tag}b", check=False)
