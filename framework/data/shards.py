"""Records in shards: tar files (WebDataset's layout), and tables. Each record can be read by its number."""

import bisect
import glob
import io
import json
import os
import tarfile
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from framework.runtime.exits import error_text
from framework.runtime.local_copy import cache_folder, fetched_once

Record = Mapping[str, Any]


class Shards:
    """A map-style dataset of the records in files, in the order of the file names. `decode` turns a record into a sample.

    `cumulative_sizes` has the ends of the shards, which a windowed order keeps together (framework/samplers/windowed.py).
    """

    def __init__(self, files: str | Sequence[str], *, decode: Callable[[Record], Any] | None = None) -> None:
        patterns = [files] if isinstance(files, str) else list(files)
        found = [sorted(glob.glob(pattern, recursive=True)) for pattern in patterns]
        self.files = [path for paths in found for path in paths if os.path.isfile(path)]
        if not self.files:
            raise ValueError(f"files={', '.join(patterns)}: there is no such file")
        self._decode = decode
        self._shards = [self.open(path) for path in self.files]
        self.cumulative_sizes: list[int] = [int(end) for end in np.cumsum([len(shard) for shard in self._shards])]

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard, place = self._place(number)
        record = self._shards[shard][place]
        return record if self._decode is None else self._decode(record)

    def _place(self, number: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self.cumulative_sizes, number)
        return shard, number - (self.cumulative_sizes[shard - 1] if shard else 0)

    def name_of(self, number: int) -> str:
        """Return the place of a record, for messages."""
        shard, place = self._place(number)
        return f"{self.files[shard]}, record {place}"

    @abstractmethod
    def open(self, path: str) -> Any:
        """Return the records of a shard: what has a length and an index. ValueError if the shard is damaged."""


class Tar(Shards):
    """Tar files in WebDataset's layout: files with the same name up to the first dot are a record, with a value per ending."""

    def open(self, path: str) -> "_TarShard":
        return _TarShard(path, _members(path))


_Members = list[list[tuple[str, int, int]]]  # for each record of a shard: ending, offset, size


@dataclass
class _TarShard:
    path: str
    members: _Members

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, place: int) -> Record:
        record = {}
        with open(self.path, "rb") as file:
            for ending, offset, size in self.members[place]:
                file.seek(offset)
                content = file.read(size)
                if len(content) < size:
                    raise ValueError(f"{self.path} ends within .{ending}")
                record[ending] = value_of(ending, content)
        return record


def _members(path: str) -> _Members:
    """Return a tar file's members. The list is kept in the folder of copies, until the file changes."""

    def fetch(folder: Path) -> None:
        (folder / "members.json").write_text(json.dumps(_listed(path)))

    known = os.stat(path)
    with suppress(OSError, ValueError):
        folder = fetched_once([os.path.realpath(path), str(known.st_size), str(known.st_mtime_ns)], fetch)
        members: _Members = json.loads((folder / "members.json").read_text())
        return members
    return _listed(path)  # there is no disk for the list, or it is damaged; or the file is, and then this says so


def _listed(path: str) -> _Members:
    records: _Members = []
    before = None
    try:
        with tarfile.open(path, "r:") as archive:  # no compression, so that one record can be read alone
            for member in archive:
                if not member.isfile():
                    continue
                folder, _, last = member.name.rpartition("/")
                stem, _, ending = last.partition(".")
                if (folder, stem) != before:
                    records.append([])
                    before = (folder, stem)
                records[-1].append((ending.lower(), member.offset_data, member.size))
    except tarfile.TarError as error:
        raise ValueError(f"{path} cannot be read as a tar file without compression: {error}") from error
    return records


class Tables(Shards):
    """Tables of which each row is a record: lines of JSON (`.jsonl`, `.json`), Parquet, CSV, Arrow.

    `datasets` of Hugging Face converts each file once, into the folder of copies, and maps the rows into memory.
    """

    def open(self, path: str) -> Any:
        import datasets  # type: ignore[import-untyped]  # unannotated

        kind = FORMATS.get(Path(path).suffix.lower())
        if kind is None:
            raise ValueError(f"{path} is not a table ({', '.join(FORMATS)})")
        datasets.disable_progress_bars()
        cache = str(cache_folder() / "tables")
        try:
            return datasets.load_dataset(kind, data_files=path, split="train", cache_dir=cache)
        except Exception as error:  # of pyarrow, of the conversion, of an empty file
            raise ValueError(f"{path} cannot be read as {kind}: {error_text(error)}") from error


FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def value_of(ending: str, content: bytes) -> Any:
    """Return the content of a file in a tar record, by its ending: an image as uint8 (C, H, W), array, JSON, number or text."""
    last = ending.rpartition(".")[2]
    if last in ("jpg", "jpeg", "png", "ppm", "pgm", "webp", "bmp"):
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("L" if image.mode in ("1", "L", "I;16") else "RGB"))
        return pixels[None].copy() if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if last == "npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    if last == "json":
        return json.loads(content)
    if last in ("cls", "index", "inx", "id"):
        return int(content)
    return content.decode() if last in ("txt", "text", "transcript") else content


def write_tar(path: Path, records: Sequence[Record]) -> None:
    """Write records to a tar file in WebDataset's layout; the values must be arrays, numbers, text or bytes."""
    with tarfile.open(path, "w") as archive:
        for number, record in enumerate(records):
            for ending, value in record.items():
                content = _content_of(value)
                member = tarfile.TarInfo(f"{number:08d}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def _content_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return file.getvalue()
    if isinstance(value, (dict, list)):
        return json.dumps(value).encode()
    if not isinstance(value, (bytes, str, int, float, np.generic)):
        raise TypeError(
            f"a {type(value).__name__} cannot be in a record; bytes, text, a number, an array of NumPy, a dict or list can"
        )
    return value if isinstance(value, bytes) else str(value).encode()
