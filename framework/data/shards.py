"""Records in shards: tar files (WebDataset's layout), lines of JSON, Parquet. Each record can be read by its number."""

import bisect
import glob
import io
import json
import os
import tarfile
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

Record = Mapping[str, Any]
_OPEN = 16  # the number of shards that a process keeps open


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
        self.cumulative_sizes: list[int] = [int(end) for end in np.cumsum([self.count(path) for path in self.files])]
        self._open = lru_cache(_OPEN)(self.open)

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard, place = self._place(number)
        record = self.read(self._open(self.files[shard]), self.files[shard], place)
        return record if self._decode is None else self._decode(record)

    def _place(self, number: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self.cumulative_sizes, number)
        return shard, number - (self.cumulative_sizes[shard - 1] if shard else 0)

    def name_of(self, number: int) -> str:
        """Return the place of a record, for messages."""
        shard, place = self._place(number)
        return f"{self.files[shard]}, record {place}"

    @abstractmethod
    def count(self, path: str) -> int:
        """Find the records of a shard; return their number. ValueError if the shard is damaged."""

    @abstractmethod
    def open(self, path: str) -> Any:
        """Open a shard for `read`."""

    @abstractmethod
    def read(self, file: Any, path: str, place: int) -> Record:
        """Return a record of an open shard. ValueError if it is damaged."""


class Tar(Shards):
    """Tar files in WebDataset's layout: files with the same name up to the first dot are a record, with a value per ending."""

    def __init__(self, files: str | Sequence[str], *, decode: Callable[[Record], Any] | None = None) -> None:
        self._members: dict[str, list[list[tuple[str, int, int]]]] = {}  # for each record of a shard: ending, offset, size
        super().__init__(files, decode=decode)

    def count(self, path: str) -> int:
        records: list[list[tuple[str, int, int]]] = []
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
        self._members[path] = records
        return len(records)

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, file: int, path: str, place: int) -> Record:
        record = {}
        for ending, offset, size in self._members[path][place]:
            content = os.pread(file, size, offset)
            if len(content) < size:
                raise ValueError(f"{path} ends within .{ending}")
            record[ending] = value_of(ending, content)
        return record


class JsonLines(Shards):
    """Text files with a JSON object on each line. Empty lines do not count."""

    def __init__(self, files: str | Sequence[str], *, decode: Callable[[Record], Any] | None = None) -> None:
        self._starts: dict[str, np.ndarray] = {}
        self._sizes: dict[str, np.ndarray] = {}
        super().__init__(files, decode=decode)

    def count(self, path: str) -> int:
        starts, sizes, offset = [], [], 0
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    starts.append(offset)
                    sizes.append(len(line))
                offset += len(line)
        self._starts[path], self._sizes[path] = np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64)
        return len(starts)

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, file: int, path: str, place: int) -> Record:
        record: Record = json.loads(os.pread(file, int(self._sizes[path][place]), int(self._starts[path][place])))
        return record


class Parquet(Shards):
    """Parquet files: each row is a record (all columns, or `columns`). A row group is read at once: keep its rows together."""

    def __init__(
        self, files: str | Sequence[str], *, columns: list[str] | None = None, decode: Callable[[Record], Any] | None = None
    ) -> None:
        self._columns = columns
        self._ends: dict[str, list[int]] = {}  # of a shard's row groups
        super().__init__(files, decode=decode)
        self._group = lru_cache(4)(self._read_group)

    def count(self, path: str) -> int:
        import pyarrow.parquet

        metadata = pyarrow.parquet.read_metadata(path)
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._ends[path] = [int(end) for end in np.cumsum(sizes)]
        return int(metadata.num_rows)

    def open(self, path: str) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(path)

    def read(self, file: Any, path: str, place: int) -> Record:
        ends = self._ends[path]
        group = bisect.bisect_right(ends, place)
        row = self._group(path, group).slice(place - (ends[group - 1] if group else 0), 1)
        return {name: values[0] for name, values in row.to_pydict().items()}

    def _read_group(self, path: str, group: int) -> Any:
        return self._open(path).read_row_group(group, columns=self._columns)


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
