"""What the files of a logger hold, read by its own package or by hand."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import files_below, wait_for

OFFLINE = ["logger=wandb", "logger.wandb.mode=offline"]


def wandb_files(directory: Path) -> list[Path]:
    return sorted((directory / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def written(folder: Path, pattern: str) -> bool:
    return any(path.stat().st_size for path in files_below(folder, pattern))


def when(condition: Callable[[], bool], act: Callable[[], None]) -> Callable[[], None]:
    """Return what waits for a condition, and then acts."""

    def wait_and_act() -> None:
        wait_for(condition, what=f"what comes before {act.__name__}")
        act()

    return wait_and_act


Scalars = dict[tuple[str, int], float]  # (SPLIT/METRIC, step) -> value


def scalars_of(rows: list[dict[str, Any]]) -> Scalars:
    return {
        (f"{row['split']}/{name}", row["step"]): value
        for row in rows
        for name, value in row.items()
        if name not in ("step", "split")
    }


def tensorboard_events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "images": 0, "tensors": 0, "histograms": 0}
    return EventAccumulator(str(directory / "tensorboard"), size_guidance=everything).Reload()


def tensorboard_scalars(directory: Path, *, splits: tuple[str, ...] = ("train", "val", "test")) -> Scalars:
    """Return what is in the event files; a step that is there twice is an error."""
    reader = tensorboard_events(directory)
    found: Scalars = {}
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag) if tag.split("/")[0] in splits else []:
            assert (tag, event.step) not in found, f"{tag} has step {event.step} twice"
            found[tag, event.step] = event.value
    return found


def wandb_records(file: Path) -> Iterator[Any]:
    """Read a `.wandb` file: records in LevelDB's log format, after a header of 7 bytes; each a protocol buffer."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no room for a header in this block
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def wandb_rows(file: Path) -> Scalars:
    """Return what a `.wandb` file holds of rows; a step that goes backwards is an error."""
    found: Scalars = {}
    steps = [0]
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            steps.append(row["_step"])
            found |= {(name, row["_step"]): value for name, value in row.items() if name[0] != "_"}
    assert steps == sorted(set(steps))
    return found


def wandb_summary(file: Path) -> dict[str, Any]:
    updates = [item for record in wandb_records(file) for item in record.summary.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


def wandb_run(file: Path) -> Any:
    return next(record.run for record in wandb_records(file) if record.WhichOneof("record_type") == "run")


def assert_equal(actual: Scalars, expected: Scalars) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key  # event files hold float32
