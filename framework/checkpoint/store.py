"""A run's checkpoints: saved by all ranks, committed by one, verified on load, deleted only after their successor."""

import functools
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from framework.checkpoint import manifest
from framework.checkpoint.state import read_state
from framework.checkpoint.tensors import check_tensors
from framework.distributed.world import World
from framework.modules.tensors import local
from framework.runtime.exits import DiskFailed, NoValidCheckpoint
from framework.runtime.files import flush_directory, make_directory, write_atomically
from framework.runtime.lock import Claim
from framework.runtime.log import LOGGER
from framework.runtime.plain import Invalid


@dataclass(frozen=True)
class CheckpointStore:
    """The folder `checkpoints/` of a run. Every method is collective unless it says otherwise."""

    directory: Path
    _: KW_ONLY
    world: World
    keep_last: int
    keep_best: int
    mode: str
    claim: Claim = Claim(Path())  # to the run's directory

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write and commit the checkpoint of `step`. DiskFailed on every rank if any of them could not write.

        `state` is plain JSON data, rank 0's; `state["monitor"]` is the value that "best" compares, or None.
        """
        target = self.directory / manifest.directory_name(step)
        staging = self.directory / f".tmp_{self.claim.token}_{target.name}"
        together = functools.partial(self.world.agreement.together, what=f"checkpoint of step {step} not written")
        try:
            together(lambda: self._clear(staging), rank_0_only=True)
            files = together(lambda: self._write(staging, tensors))
            together(lambda: self._commit(staging, target, files, state), rank_0_only=True)
        except DiskFailed:
            with suppress(OSError):
                manifest.remove(staging)  # room for the summary, which reports it
            raise

    def _clear(self, staging: Path) -> None:
        self.claim.require()
        make_directory(self.directory)
        manifest.remove_unfinished(self.directory)
        staging.mkdir()

    def _write(self, staging: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter, save  # takes a second
        from torch.distributed.checkpoint.api import CheckpointException

        # safetensors, not torch.save: nothing to unpickle. One thread: with more, torch's writer loses their errors
        writer = HuggingFaceStorageWriter(str(staging), save_distributed=True, thread_count=1)
        try:
            save(_apart(tensors), storage_writer=writer, **self.world.agreement.among())
        except CheckpointException as error:
            for rank, (failure, _) in error.failures.items():
                if not isinstance(failure, OSError):  # a full disk is expected; this is our error, or the model's
                    raise RuntimeError(f"checkpoint: rank {rank}: {' '.join(str(failure).split())}") from error
                if rank == self.world.rank:
                    raise failure from error
        return {path.name: manifest.digest(path) for path in staging.glob(f"shard-{self.world.rank + 1:05d}-*")}

    def _commit(self, staging: Path, target: Path, files: list[dict[str, Any]], state: dict[str, Any]) -> None:
        merged = {name: entry for part in files for name, entry in part.items()}
        write_atomically(staging / manifest.STATE, json.dumps(state, indent=1) + "\n")
        merged[manifest.STATE] = manifest.digest(staging / manifest.STATE)
        self.claim.require()
        manifest.commit(staging, target=target, files=merged)
        self._prune(target)

    def _prune(self, committed: Path) -> None:
        """Delete what is neither among the last nor among the best. After a commit: a valid checkpoint always remains.

        A checkpoint of a later step is invalid, and must not push out the one that has just been committed.
        """
        found = manifest.candidates(self.directory)
        kept = {committed} | set(found[: self.keep_last]) | set(self._best(found)[: self.keep_best])
        self._discard([path for path in found if path not in kept])

    def _best(self, found: list[Path]) -> list[Path]:
        values = {path: value for path in found if (value := _monitor(path)) is not None}
        return sorted(values, key=lambda path: values[path], reverse=self.mode == "max")

    def is_among_best(self, value: float) -> bool:
        """Return whether a checkpoint with this monitored value would be kept for it."""
        sign = -1 if self.mode == "max" else 1
        others = [other for path in manifest.candidates(self.directory) if (other := _monitor(path)) is not None]
        num_better = sum(sign * other <= sign * value for other in others)
        return self.world.agreement.from_rank_0(num_better < self.keep_best)

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps. DiskFailed on every rank if that cannot be done."""
        what = f"checkpoints after step {step} not deleted"

        def drop() -> None:
            self._discard(path for path in manifest.candidates(self.directory) if (manifest.step_of(path) or 0) > step)

        self.world.agreement.together(drop, what=what, rank_0_only=True)

    def _discard(self, paths: Iterable[Path]) -> None:
        for path in paths:
            manifest.discard(path)
        flush_directory(self.directory)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing that looks like a checkpoint."""
        return self.world.agreement.from_rank_0(not manifest.candidates(self.directory))

    def newest_valid(
        self, *, back: int = 0, unfit: Callable[[Path, dict[str, Any]], str | None] = lambda path, state: None
    ) -> tuple[Path, dict[str, Any]] | None:
        """Return the `back`-th newest valid checkpoint (0 = the newest), or the oldest, and its state; None if there is none.

        Passes over what is damaged, or why it is `unfit`, with a warning; NoValidCheckpoint, with a line for each, if that
        is all. `unfit`, collective, gets a path and a state.
        """
        found = self.world.agreement.from_rank_0(manifest.candidates(self.directory))
        reasons: list[str] = []
        for path in found[min(back, max(0, len(found) - 1)) :]:
            reason, state = self._fault(path), dict[str, Any]()
            if reason is None:
                state = read_state(path)
                reason = unfit(path, state)
            if reason is None:
                for passed_over in reasons if self.world.rank == 0 else []:
                    LOGGER.warning("checkpoint passed over: %s", passed_over)
                return path, state
            reasons.append(f"{path}: {reason}")
        if reasons:
            raise NoValidCheckpoint("\n".join([*reasons, "no valid checkpoint is left; run.resume=never starts over"]))
        return None

    def named(self, path: Path) -> tuple[Path, dict[str, Any]]:
        """Return the checkpoint `path` and its state. NoValidCheckpoint if it is damaged."""
        if reason := self._fault(path):
            raise NoValidCheckpoint(f"{path}: {reason}")
        return path, read_state(path)

    def best(self) -> Path | None:
        """Return the best checkpoint, not verified; None if none is of an evaluated step."""
        return self.world.agreement.from_rank_0(next(iter(self._best(manifest.candidates(self.directory))), None))

    def _fault(self, path: Path) -> str | None:
        """Return why a checkpoint is not valid, or None. The ranks share the work of reading it."""
        fault = None
        try:
            files = manifest.read_manifest(path)
            for name in sorted(files)[self.world.rank :: self.world.world_size]:
                manifest.verify_file(path / name, files[name])
            if self.world.rank == 0:
                step = read_state(path)["progress"]["step"]
                check_tensors(path, sorted(files.keys() - {manifest.STATE}))
                if step != manifest.step_of(path):
                    raise Invalid(f"{manifest.STATE} is of step {step}")
        except Invalid as error:
            fault = str(error)
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
        return next((f for f in self.world.agreement.gather(fault) if f is not None), None)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as safetensors takes them: contiguous (of channels last, a copy), each in memory of its own."""
    apart, memories = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        memory = local(tensor).untyped_storage()._cdata  # not its address: some devices have none
        apart[name] = tensor.clone().contiguous() if memory in memories else tensor.contiguous()
        memories.add(memory)
    return apart


def _monitor(path: Path) -> float | None:
    try:
        return read_state(path)["monitor"]
    except (OSError, Invalid):
        return None
