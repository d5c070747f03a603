"""The way back from an object store to a run's directory: verified checkpoints, and the records that belong to them."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from framework.checkpoint import manifest
from framework.runs.mirror import RECORDS, Contents, Mirror, StoredCheckpoint, read_facts
from framework.runtime.exits import NoValidCheckpoint
from framework.runtime.files import flush_directory, make_directory, replacing
from framework.runtime.log import LOGGER
from framework.runtime.objects import Objects, inside
from framework.runtime.plain import Invalid


def bring_back(mirror: Mirror, contents: Contents) -> bool:
    """Fetch a mirror's checkpoints and records if they are newer than the directory's. Return whether they are newer.

    All valid checkpoints are fetched, because the run may keep some as its best. Raise NoValidCheckpoint if checkpoints exist,
    but no checkpoint is valid, neither in the mirror nor in the directory.
    """
    if mirror.known.get("anew") or not contents.number:
        return False
    if mirror.is_another(contents):
        aside = mirror.directory.move_aside()
        LOGGER.info("%s holds a later start of this run: the earlier one is now in %s", mirror.url, aside)
    here = {manifest.step_of(path) or 0 for path in manifest.candidates(mirror.directory.checkpoints) if _has_manifest(path)}
    newest, last = max(here, default=-1), f"{contents.number:06d}/"
    summary = {} if mirror.directory.is_finished else read_facts(mirror.objects, f"{last}summary.json")
    is_finished = summary.get("status") == "finished"
    wanted = [stored for stored in contents.checkpoints if stored.step not in here]
    if not is_finished and all(stored.step < newest for stored in wanted):
        return False
    make_directory(mirror.directory.checkpoints)
    manifest.remove_unfinished(mirror.directory.checkpoints)  # a finished run would never do this
    staging = mirror.directory.checkpoints / f".tmp_{secrets.token_hex(8)}"
    try:
        fetched = fetch_valid(mirror.objects, wanted, contents, into=staging, has_other=bool(here))
        if not is_finished and all(stored.step < newest for stored in fetched):
            return False
        # with this order a kill leaves nothing that looks complete: the rows come before the checkpoint that needs them
        source = last if is_finished else f"{fetched[0].number:06d}/"
        _fetch_records(mirror, RECORDS[:-1], contents, source=source)
        for stored in reversed(fetched):
            target = mirror.directory.checkpoints / stored.name
            if target.exists():  # the checkpoint is damaged
                manifest.discard(target)
            os.rename(staging / stored.name, target)
        flush_directory(mirror.directory.checkpoints)
        _fetch_records(mirror, RECORDS[-1:], contents, source=source)
    finally:
        manifest.remove(staging)
    return True


def _fetch_records(mirror: Mirror, names: Sequence[str], contents: Contents, *, source: str) -> None:
    for name in names:
        if source + name in contents.objects:
            with replacing(mirror.directory.path / name) as beside:
                mirror.objects.get(source + name, beside)


def _has_manifest(path: Path) -> bool:
    try:
        return bool(manifest.read_manifest(path))
    except (Invalid, OSError):
        return False


def fetch_valid(
    objects: Objects,
    wanted: list[StoredCheckpoint],
    contents: Contents,
    *,
    into: Path,
    most: int | None = None,
    has_other: bool = False,
) -> list[StoredCheckpoint]:
    """Fetch the valid checkpoints, at most `most`, into a folder. Return the fetched checkpoints.

    Raise NoValidCheckpoint if none of several is valid, unless the run can continue from another checkpoint (`has_other`).
    """
    fetched, reasons = dict[str, StoredCheckpoint](), list[str]()
    for stored in wanted:
        if stored.name in fetched or len(fetched) == most:
            continue
        try:
            _fetch_checkpoint(objects, stored, contents, into=into)
            fetched[stored.name] = stored
            LOGGER.info("fetched %s from %s", stored.name, objects.url)
        except Invalid as error:
            reasons.append(f"{objects.url}/{stored.folder}: {error}")
            LOGGER.warning("%s; passing over it", reasons[-1])
    if reasons and not fetched and not has_other:
        raise NoValidCheckpoint("no valid checkpoint is left:\n  " + "\n  ".join(reasons))
    return [*fetched.values()]


def _fetch_checkpoint(objects: Objects, stored: StoredCheckpoint, contents: Contents, *, into: Path) -> None:
    path = into / stored.name
    path.mkdir(parents=True)
    try:
        for name in contents.folders[stored.number, stored.name]:
            with replacing(inside(path, name.rpartition("/")[2])) as beside:
                objects.get(name, beside)
        for name, entry in manifest.read_manifest(path).items():
            manifest.verify_file(path / name, entry)
        flush_directory(path)
    except Invalid:
        manifest.remove(path)
        raise
