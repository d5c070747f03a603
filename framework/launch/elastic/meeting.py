"""The store of an elastic run, through which its nodes agree: one node serves it, and a file in a shared folder says where."""

import hashlib
import hmac
import json
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from framework.distributed.groups import connect_store, hang_up, serve_store
from framework.launch.network import Network, interface_of
from framework.runtime.environment import node_name
from framework.runtime.exits import Exit, Interrupted
from framework.runtime.files import facts_in, replacing
from framework.runtime.lock import Lock, RunLocked
from framework.runtime.preemption import PREEMPTION

SILENT_S = 8.0  # without an answer: the store, or a node, counts as lost
_POLL_S = 0.25
_CONNECT_S = 2.0
_MOST_SKEW_S = 5.0  # torch compares the clocks of the nodes


def meeting_folder(directory: Path) -> Path:
    """Return the folder, beside a run's directory, of the file that names the store."""
    return directory.with_name(f".{directory.name.lstrip('.')}.elastic")


class StoreLost(Interrupted, code=Exit.PREEMPTED):
    """The node that serves the store was lost, or this node cannot reach it."""


class Meeting:
    """One node's access to the store, and to the few values that the nodes agree on there.

    The node that holds the lock of `folder` serves the store. In a Slurm job, this is the job's first node (`is_first`), and
    nodes of another `attempt` of the job do not belong to it.
    """

    def __init__(self, folder: Path, *, network: Network, attempt: list[int] | None, is_first: bool | None) -> None:
        self.folder, self.network = folder, network
        self._attempt, self._is_first = attempt, is_first
        self._lock = Lock(folder, party=None if attempt is None else f"job {attempt[0]}")
        self._file = folder / "store.json"
        self.serves = False
        self.host, self.port, self.number = "", 0, 0  # the store's address, and this node's number by order of arrival
        self._own = ""  # this node's address in the network of the store

    def enter(self, *, timeout_s: float, command: dict[str, Any]) -> None:
        """Find the store, or serve it. Raise ValueError if the other nodes have another command, or a very different clock."""
        began = time.monotonic()
        while not (self._serve() or self._connect()):
            if PREEMPTION.requested:
                raise Interrupted("stopped before this node joined the run; the same command joins it")
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"the store of the run's nodes does not answer within launch.timeout_s={timeout_s:g}"
                                   f" ({self._where()})")  # fmt: skip
            time.sleep(_POLL_S)
        if not self.serves and abs(skew_s := time.time() - self.recorded("clock")) > _MOST_SKEW_S:
            raise ValueError(f"the clock of this host differs by {skew_s:.0f} s from that of {self._place().get('node')}")
        there = self.first("command", command)
        if there != command:
            differing = [f"{key} {value} here and {there[key]} there" for key, value in command.items() if there[key] != value]
            raise ValueError(f"another command than on the run's other nodes: {'; '.join(differing)}")
        self.number = self.count("nodes")

    def _serve(self) -> bool:
        """Serve the store, unless another node does."""
        if self._is_first is False:
            return False
        try:
            self._lock.take()
        except FileNotFoundError:  # the node that has served the store has just removed the folder
            return False
        except RunLocked:
            if self._is_first:
                raise
            return False
        self.serves = True
        for path in self.folder.iterdir():  # of nodes that were lost
            if path != self._lock.path:
                path.unlink()
        self.host = self.network.given_address or "127.0.0.1"
        self.store, self.port = serve_store(self.network.given_address or "")
        self._secret = secrets.token_hex(16)
        self.store.set(_mark(self._secret), "")
        place = {"token": self._lock.token, "attempt": self._attempt, "node": node_name(), "port": self.port}
        with replacing(self._file) as beside:
            beside.touch(mode=0o600)
            beside.write_text(json.dumps(place | {"addresses": self.network.addresses, "secret": self._secret}))
        return True

    def _connect(self) -> bool:
        """Connect to the store of the node that holds the lock, over the first of its addresses that answers."""
        place = self._place()
        if place.get("token") != self._lock.holder().get("token") or place.get("attempt") not in (None, self._attempt):
            return False
        for host in place["addresses"]:
            with suppress(OSError, RuntimeError, StoreLost):
                with socket.create_connection((host, place["port"]), timeout=_CONNECT_S) as connection:
                    self._own = connection.getsockname()[0]
                self.store = connect_store(host, place["port"], silent_s=SILENT_S)
                self.host, self.port, self._secret = host, place["port"], place["secret"]
                # no key: another process of this machine has the address; no clock: the other node has just begun
                if self.store.check([_mark(self._secret)]) and self.recorded("clock") is not None:
                    self.first("host", host)
                    return True
        return False

    @property
    def interface(self) -> str | None:
        """The interface over which the nodes reach each other. None if no other node has come yet."""
        address = (self.recorded("host") or "") if self.serves else self._own
        return interface_of(address) if address else None

    def _place(self) -> dict[str, Any]:
        with suppress(OSError):
            return {"token": ""} | facts_in(self._file.read_bytes())
        return {"token": ""}

    def _where(self) -> str:
        place = self._place()
        return f"{place['node']}, {', '.join(place['addresses'])}" if "node" in place else "no node serves it"

    # --- values, as JSON

    def first(self, key: str, value: Any) -> Any:
        """Record a value, unless a node has recorded another value before. Return the recorded value."""
        return json.loads(self._ask("compare_set", key, "", json.dumps(value)))

    def recorded(self, key: str) -> Any:
        """Return a recorded value, or None."""
        return json.loads(self._ask("get", key)) if self._ask("check", [key]) else None

    def count(self, key: str) -> int:
        """Add one to a number, and return it."""
        return int(self._ask("add", key, 1))

    def end(self, code: int, *, error: str | None = None) -> None:
        """Record how the run has ended, unless it is recorded already."""
        self.first("end", {"code": code, "error": error})

    def _ask(self, request: str, *arguments: Any) -> Any:
        try:
            return getattr(self.store, request)(*arguments)
        except RuntimeError as error:
            raise self.lost() from error

    def lost(self) -> StoreLost:
        """Give the store up. A request of another thread, such as a heartbeat, would wait for seconds, twice."""
        if not self.serves:
            hang_up(self.port)
        what = f"the store of the run's nodes does not answer ({self._where()})"
        return StoreLost(f"{what}; the same command on every node continues the run")

    def backend(self, before_join: Callable[[], None]) -> "SignedBackend":
        """Return the record of torch's rendezvous in this store."""
        return SignedBackend(self.store, secret=self._secret, serves=self.serves, before_join=before_join)

    def leave(self, alive: Callable[[], list[int]]) -> None:
        """Leave. The node that serves waits for the others to leave or to be lost (`alive` are the others' numbers)."""
        if not self.serves:
            with suppress(StoreLost):  # this node knows already how the run has ended
                self.first(f"gone_{self.number}", True)
            return
        while any(self.recorded(f"gone_{number}") is None for number in alive() if number != self.number):
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Remove the folder, if this node has served the store. If the run has not ended, the other nodes lose the store."""
        if not self.serves:
            return
        with suppress(OSError):  # a disk error leaves an old folder, which the next node that serves clears
            trash = self.folder.rename(self.folder.with_name(f"{self.folder.name}.{secrets.token_hex(8)}"))
            self._lock.release()
            shutil.rmtree(trash, ignore_errors=True)


def _mark(secret: str) -> str:
    """Return the key by which a node recognises the store, without a disclosure of the secret to another program's server."""
    return hashlib.sha256(secret.encode()).hexdigest()


class SignedBackend(C10dRendezvousBackend):
    """Torch's record of the rendezvous. Torch unpickles it, so only a record with the signature of the run's nodes counts.

    `before_join` is called each time that a joining node reads the record, about once per second; it may raise.
    """

    def __init__(self, store: dist.Store, *, secret: str, serves: bool, before_join: Callable[[], None]) -> None:
        super().__init__(store, "run")
        self._secret, self._serves, self._before_join = secret.encode(), serves, before_join
        self.joins = False

    def get_state(self) -> tuple[bytes, Any] | None:
        if self.joins:
            self._before_join()
        found = super().get_state()
        return None if found is None else (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if self._serves:
            self._store.set("clock", json.dumps(time.time()))
        found = super().set_state(self._signature(state) + state, token)
        return None if found is None else (self._opened(found[0]), *found[1:])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, state, hashlib.sha256)

    def _opened(self, signed: bytes) -> bytes:
        if not hmac.compare_digest(signed[:32], self._signature(signed[32:])):
            raise RuntimeError("the record of the run's nodes was changed by another program")
        return signed[32:]
