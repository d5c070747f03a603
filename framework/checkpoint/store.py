"""A run's checkpoints. All ranks save, one rank commits, a load verifies, and a deletion comes after a new checkpoint."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from framework.checkpoint import manifest
from framework.checkpoint.chunks import chunks_of
from framework.checkpoint.format import check_inventory, inventory_of, write_shard
from framework.distributed.world import World
from framework.runtime.exits import DiskFailed, NoValidCheckpoint
from framework.runtime.files import flush_to_disk, make_directory
from framework.runtime.lock import Claim
from framework.runtime.log import LOGGER
from framework.runtime.plain import Invalid

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class CheckpointStore:
    """The folder `checkpoints/` of a run. Every method is collective, unless its docstring says otherwise."""

    directory: Path
    _: KW_ONLY
    world: World
    keep_last: int
    keep_best: int
    mode: str
    claim: Claim = Claim(Path())  # the claim to the run's directory
    keeps_scheduled: bool = False  # then the last checkpoints that were saved by checkpoint.every are kept too

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write and commit the checkpoint of `step`. Raise DiskFailed on every rank if any rank could not write.

        This rank writes its parts of `tensors`: no other rank may have the same part (`WritePlan`). `state` is plain JSON data
        from rank 0. `state["monitor"]` is the value that decides which checkpoint is best, or None.
        """
        target = self.directory / manifest.directory_name(step)
        staging = self.directory / f".tmp_{self.claim.token}_{target.name}"
        agreement, what = self.world.agreement, f"checkpoint of step {step} not written"
        try:
            agreement.on_rank_0(lambda: self._clear(staging), what=what)
            written = agreement.all_or_fail(lambda: self._write(staging, tensors), what=what)
            files = agreement.to_rank_0(written)
            agreement.on_rank_0(lambda: self._commit(staging, target, files, state), what=what)
        except DiskFailed:
            if self.world.rank == 0:  # one rank only: otherwise each rank would list the folder and delete each file
                with suppress(OSError):
                    manifest.remove(staging)  # frees space for the summary, which reports the error
            raise

    def _clear(self, staging: Path) -> None:
        self.claim.require()
        if not manifest.candidates(self.directory):  # an earlier checkpoint's save has flushed the folder's name
            make_directory(self.directory)
        manifest.remove_unfinished(self.directory)
        staging.mkdir()

    def _write(self, staging: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
        name = f"shard-{self.world.rank + 1:05d}.safetensors"
        return {name: write_shard(staging / name, chunks_of(tensors))} if tensors else {}

    def _commit(self, staging: Path, target: Path, files: list[dict[str, Any]], state: dict[str, Any]) -> None:
        self.claim.require()
        merged = {name: entry for part in files for name, entry in part.items()}
        manifest.commit(staging, target=target, files=merged, state=state)
        self._prune(target)

    def _prune(self, committed: Path) -> None:
        """Delete the checkpoints that are neither among the last nor among the best. Call this after a commit.

        Thus a valid checkpoint always remains. A checkpoint of a later step is invalid: the run has skipped it.
        """
        found = manifest.candidates(self.directory)  # the newest first
        valid = found[found.index(committed) :]
        kept = {*valid[: self.keep_last], *self._best(valid)[: self.keep_best]}
        if self.keeps_scheduled:
            kept.update([path for path in valid if _is_scheduled(path)][: self.keep_last])
        for path in found:
            if path not in kept:
                manifest.discard(path)  # not flushed: after a power cut it may exist again; the next deletion removes it

    def _best(self, found: list[Path]) -> list[Path]:
        """Return the checkpoints of evaluated steps, the best first; of equal ones, the earliest, as in a run's summary."""
        values = {path: value for path in reversed(found) if (value := _of_state(path, "monitor")) is not None}
        sign = -1 if self.mode == "max" else 1
        return sorted(values, key=lambda path: sign * values[path])

    def is_among_best(self, value: float) -> bool:
        """Return whether a checkpoint with this monitored value would be kept as one of the best."""
        sign = -1 if self.mode == "max" else 1

        def is_among() -> bool:
            others = [_of_state(path, "monitor") for path in manifest.candidates(self.directory)]
            return sum(other is not None and sign * other <= sign * value for other in others) < self.keep_best

        return self._listed(is_among)

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps. Raise DiskFailed on every rank if this fails."""
        what = f"checkpoints after step {step} not deleted"

        def drop() -> None:
            for path in manifest.candidates(self.directory):
                if (manifest.step_of(path) or 0) > step:
                    manifest.discard(path)
            flush_to_disk(self.directory)

        self.world.agreement.on_rank_0(drop, what=what)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing looks like a checkpoint."""
        return self._listed(lambda: not manifest.candidates(self.directory))

    def newest_valid(
        self, *, back: int = 0, unfit: Callable[[Path, dict[str, Any]], str | None] = lambda path, state: None,
        is_scheduled: bool = False,
    ) -> tuple[Path, dict[str, Any]] | None:  # fmt: skip
        """Return the `back`-th newest valid checkpoint (0 = the newest), or else the oldest, and its state.

        With `is_scheduled`, only those count that were saved by checkpoint.every. Return None without checkpoints. Skip
        checkpoints that are damaged, or for which `unfit` returns a reason, with a warning. If none remains, raise
        NoValidCheckpoint with a line for each. `unfit` is collective, and gets a path and a state.
        """
        if self.claim.token:
            self.world.agreement.on_rank_0(
                lambda: manifest.put_back(self.directory), what=f"{self.directory} cannot be written"
            )
        found = self._listed(lambda: manifest.candidates(self.directory))
        if is_scheduled:
            found = self._listed(lambda: [path for path in found if _is_scheduled(path)])
        reasons, is_damaged = list[str](), False
        for path in found[min(back, max(0, len(found) - 1)) :]:
            reason, state = self._verified(path)
            if reason is None:
                reason = unfit(path, state)
            if reason is None:
                for reason in reasons if self.world.rank == 0 else []:
                    LOGGER.warning("skipped checkpoint: %s", reason)
                return path, state
            is_damaged |= not state
            reasons.append(f"{path}: {reason}")
        if reasons:
            left = "no valid checkpoint is left" if is_damaged else "no checkpoint fits: the run's data or model has changed"
            raise NoValidCheckpoint("\n".join([*reasons, f"{left}; run.resume=never starts over"]))
        return None

    def named(self, path: Path) -> tuple[Path, dict[str, Any]]:
        """Return the checkpoint `path` and its state. Raise NoValidCheckpoint if it is damaged."""
        reason, state = self._verified(path)
        if reason is not None:
            raise NoValidCheckpoint(f"{path}: {reason}")
        return path, state

    def best(self) -> Path | None:
        """Return the best checkpoint, without verifying it. Return None if no checkpoint is of an evaluated step."""
        return self._listed(lambda: next(iter(self._best(manifest.candidates(self.directory))), None))

    def _listed(self, look: Callable[[], _Result]) -> _Result:
        """Return the result of `look` on rank 0, which alone lists the folder and reads its files. Collective."""
        return self.world.agreement.on_rank_0(look, what=f"{self.directory} cannot be listed")  # type: ignore[no-any-return]

    def _verified(self, path: Path) -> tuple[str | None, dict[str, Any]]:
        """Return why a checkpoint is not valid, or None, and the checkpoint's state.

        Only rank 0 reads the manifest and the headers, because otherwise every rank would read every file. The ranks divide
        the verification of the files' contents.
        """
        files, state = dict[str, Any](), dict[str, Any]()

        def describe() -> None:
            files.update(manifest.read_manifest(path))
            check_inventory(inventory_of(path, sorted(files)))
            state.update(manifest.read_state(path))
            if (step := state["progress"]["step"]) != manifest.step_of(path):
                raise Invalid(f"its state is of step {step}")

        def verify_share() -> None:
            for name in sorted(files)[self.world.rank :: self.world.world_size]:
                manifest.verify_file(path / name, files[name])

        agreement = self.world.agreement
        fault = _fault(describe) if self.world.rank == 0 else None
        fault, files, state = agreement.from_rank_0((fault, files, state))
        if fault is None:
            fault = next((f for f in agreement.distinct(_fault(verify_share)).values() if f is not None), None)
        return fault, state if fault is None else {}


def _fault(look: Callable[[], None]) -> str | None:
    """Return why the check `look` fails, or None if it does not."""
    try:
        look()
    except Invalid as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _is_scheduled(path: Path) -> bool:
    """Return whether a checkpoint was saved by checkpoint.every, as far as it says so."""
    return _of_state(path, "is_scheduled") is not False


def _of_state(path: Path, name: str) -> Any:
    """Return a value of a checkpoint's state; None if it cannot be read."""
    try:
        return manifest.read_state(path).get(name)
    except (OSError, Invalid):
        return None
