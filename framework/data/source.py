"""The data interface: the protocols of a dataset and of one loaded split (a source), and the common sources."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import numpy as np
from annotated_types import Ge

if TYPE_CHECKING:
    from torch import Tensor

Split = str  # train, val, val.NAME for further validation sets, or test
SPLITS = ("train", "val", "test")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")  # of images
AtLeastOne = Annotated[int, Ge(1)]  # the check of the configuration refuses other values
NotNegative = Annotated[int, Ge(0)]
_Method = TypeVar("_Method", bound=Callable[..., Any])
_VECTORISED: set[Any] = set()  # the functions, not an attribute: functools.wraps would copy an attribute to a wrapper


def vectorised(method: _Method) -> _Method:
    """Mark a `gather` or `transform` that handles a whole batch in a few operations; a transform draws only from its keys.

    If the samples are in memory, a loader process would only make such a gather slower, so none is started. Such a transform
    works on tensors on any device, so a GPU runs it, and the stored bytes are sent there. A method that overrides or wraps a
    marked method is not marked.
    """
    _VECTORISED.add(method)
    return method


def is_vectorised(method: Callable[..., Any]) -> bool:
    return getattr(method, "__func__", method) in _VECTORISED


def is_in_memory(source: Any) -> bool:
    """Return whether a source's samples are rows of arrays in memory, gathered by a marked method."""
    stored = getattr(source, "selected_from", source)
    if not is_vectorised(stored.gather) or hasattr(stored, "sample"):
        return False
    return all(type(value) is np.ndarray or isinstance(value, (int, float, str, NoneType)) for value in vars(stored).values())


def draws_nothing(source: Any, transform: Callable[..., Any]) -> bool:
    """Return whether a source only indexes stored arrays and `transform` is ours: no other code runs, and none draws."""
    stored = getattr(source, "selected_from", source)
    arrays = (value for value in vars(stored).values() if not isinstance(value, (int, NoneType)))
    is_ours = getattr(transform, "__func__", None) in (Images.transform, TokenSequences.transform)
    return is_ours and type(stored) in (Arrays, Windows) and all(type(array) in (np.ndarray, np.memmap) for array in arrays)


class Source(Protocol):
    """One loaded split."""

    def __len__(self) -> int: ...

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Return the inputs and targets of these samples, batch dim first, in the stored dtype.

        Each is an array or a tensor, or a dictionary, tuple or list of these.
        """
        ...

    # A source may also have `sample(index)` and `collate(samples) -> (inputs, targets)` (framework/data/map_style.py). Then
    # each sample is fetched separately, after the generators of torch, numpy and random have been seeded by its number.
    # A source with `is_stream = True` is read in its order; its sample numbers count on over all epochs. It has `mark(number)`,
    # what a checkpoint keeps of the place before a sample (a dictionary of plain values), and `seek(mark)`.


class Selected:
    """A source of some samples of another source, by their numbers."""

    def __init__(self, source: Source, numbers: np.ndarray) -> None:
        self.selected_from, self._numbers = source, numbers
        if hasattr(source, "is_stream"):
            self.is_stream = True
        if hasattr(source, "sample"):  # in a stream, samples are counted over all epochs
            self.sample = lambda index: source.sample(int(numbers[index % len(numbers)]))
            self.collate = source.collate  # type: ignore[attr-defined]
        if hasattr(source, "begin_epoch"):
            self.begin_epoch = source.begin_epoch
        if hasattr(source, "stored"):
            self.stored = lambda indices: source.stored(numbers[indices])
            self.num_stored = getattr(source, "num_stored", len(source))

    def __len__(self) -> int:
        return len(self._numbers)

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        return self.selected_from.gather(self._numbers[indices])

    @property
    def groups(self) -> np.ndarray:
        """The ends of the source's groups among the selected samples, which are in order. AttributeError without groups."""
        found: Any = self.selected_from
        return np.searchsorted(self._numbers, found.groups)

    def column(self, name: str) -> np.ndarray:
        """Return a value of every sample, by its name. AttributeError if the samples have none of this name."""
        found: Any = self.selected_from
        values = found.column(name) if hasattr(found, "column") else getattr(found, name)
        return np.asarray(values)[self._numbers]


class Dataset(Protocol):
    """The class that a `conf/dataset/*.yaml` names. Its constructor stores and checks its arguments and reads no file.

    The top of its module may import only the standard library, numpy and annotated_types; torch and similar libraries are
    imported inside functions. The preflight imports the module to call `problems()`, which must not take seconds.
    """

    num_workers: int
    task: str  # the framework's task for its targets; optional

    @property
    def info(self) -> Mapping[str, int]:
        """The facts of the data that a model can use: `in_channels`, `image_size`, `num_classes`, `vocab_size`, `seq_len`...

        It may list a directory, but not do more. A fact that cannot be known because of a problem is left out.
        """
        ...

    def problems(self) -> list[str]:
        """Return why the data cannot be loaded here, one line each: `key: what (remedy)`. It must read almost nothing."""
        ...

    def load(self, split: Split) -> Source:
        """Load one split of a dataset without problems. ValueError if a file is damaged or the split has no sample."""
        ...

    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        """Turn a gathered batch into the model's inputs and targets.

        keys: uint64 (B,), one per sample; all randomness of that sample's augmentation comes from its key. None in evaluation.
        With the further arguments `epoch: int = 0` and `sample_keys: np.ndarray | None = None`, it also gets, in training, the
        number of the epoch, and a key for each sample that is the same in all epochs.
        """
        ...

    # A dataset may also have `validations`, the names of its validation splits (val, val.NAME, ...), if it has several itself;
    # `decode(tokens) -> str` for integer inputs (T,), so that loggers show samples as text, not ids; and
    # `read_folder(folder) -> (names, source)` for mode=predict, the samples in a folder (ValueError if there are none).


@dataclass(kw_only=True, eq=False)
class Images:
    """The common base of image datasets: their task, two arguments, and the conversion of a uint8 batch to a model's inputs."""

    task = "classification"
    mean: Sequence[float] = field(init=False)
    std: Sequence[float] = field(init=False)
    padding: int = field(init=False)  # the largest shift of an augmented image, in pixels
    flip = True  # half of the augmented images are mirrored

    augment: bool = False
    num_workers: NotNegative = 0

    @vectorised
    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        from framework.data.images import augment, normalise

        if keys is not None and self.augment:
            inputs = augment(inputs, keys, padding=self.padding, flip=self.flip)
        return normalise(inputs, mean=self.mean, std=self.std), targets

    def read_folder(self, folder: Path) -> tuple[list[str], "Files"]:
        """Return the images in a folder and its subfolders, in the order of their paths in the folder; all targets are 0."""
        info: Mapping[str, int] = self.info  # type: ignore[attr-defined]  # a dataset's own
        if self.task != "classification" or info["in_channels"] not in (1, 3):
            raise ValueError("its samples are not images of 1 or 3 channels, as a file can hold them")
        files = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        names = sorted(str(path.relative_to(folder)) for path in files)
        if not names:
            raise ValueError(f"{folder} holds no image ({', '.join(SUFFIXES)})")
        decode = partial(decode_image, image_size=info["image_size"], in_channels=info["in_channels"])
        return names, Files([str(folder / name) for name in names], np.zeros(len(names), dtype=np.int64), decode)


@dataclass(kw_only=True, eq=False)
class TokenSequences:
    """The common base of token datasets: their task, two arguments, and the conversion to integers for a model."""

    task = "language_modeling"

    seq_len: AtLeastOne = 128
    num_workers: NotNegative = 0

    @vectorised
    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        return inputs.long(), targets.long()


@dataclass(frozen=True, eq=False)
class Arrays:
    """Samples that are rows of arrays, for example images uint8 (N, C, H, W) and targets int64 (N,)."""

    inputs: np.ndarray
    targets: np.ndarray

    def __post_init__(self) -> None:
        _require_pairs(self.inputs, self.targets, what="inputs")

    def __len__(self) -> int:
        return len(self.inputs)

    @vectorised
    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[indices], self.targets[indices]


@dataclass(frozen=True, eq=False)
class Windows:
    """A stream of tokens (1-D, array or memmap) cut into windows; the targets are the inputs shifted by one.

    Sample i is `tokens[i * seq_len : (i + 1) * seq_len + 1]`. Neighbours share one token: it is the last target of the first
    sample and the first input of the second. Tokens at the end that do not fill a window are left out.
    """

    tokens: np.ndarray
    seq_len: int
    vocab_size: int | None = None  # if the ids may be wrong: each batch is checked

    def __post_init__(self) -> None:
        if len(self) == 0:
            what = f"{len(self.tokens)} tokens hold no sample of seq_len={self.seq_len}: it needs {self.seq_len + 1}"
            raise ValueError(f"{what} (more data, or a smaller dataset.seq_len)")

    def __len__(self) -> int:
        return num_windows(len(self.tokens), seq_len=self.seq_len)

    @vectorised
    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        batch = self.windows(indices)
        if self.vocab_size is not None and (largest := batch.max(initial=0)) >= self.vocab_size:
            file = getattr(self.tokens, "filename", "the text")
            raise ValueError(f"{file} has token id {largest}: dataset.vocab_size={self.vocab_size} must be larger")
        return batch[:, :-1], batch[:, 1:]

    def windows(self, indices: np.ndarray) -> np.ndarray:
        """Return whole windows, (B, seq_len + 1)."""
        # a view: only the requested windows are read, also from a memory-mapped file
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens, self.seq_len + 1)[:: self.seq_len]
        return windows[indices]


def decode_image(path: str | Path, *, image_size: int, in_channels: int) -> np.ndarray:
    """Read an image as uint8 (C, image_size, image_size): its centre square, resized bilinearly."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = file.convert("L" if in_channels == 1 else "RGB")
    except (OSError, Image.DecompressionBombError) as error:  # not all of PIL's errors about content name the file
        raise ValueError(f"{path} cannot be read as an image: {error} (remove or replace it)") from error
    pixels = np.asarray(ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR))
    return pixels[None] if in_channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


@dataclass(frozen=True, eq=False)
class Files:
    """Samples that are files; they are decoded at each use."""

    paths: Sequence[str]  # a million strings take half the memory of Path objects
    targets: np.ndarray
    decode: Callable[[str], np.ndarray]  # of one file

    def __post_init__(self) -> None:
        _require_pairs(self.paths, self.targets, what="files")

    def __len__(self) -> int:
        return len(self.paths)

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([self.decode(self.paths[i]) for i in indices]), self.targets[indices]


def _require_pairs(inputs: Sized, targets: Sized, *, what: str) -> None:
    if not 0 < len(inputs) == len(targets):
        counts = f"{len(inputs)} {what} and {len(targets)} targets"
        raise ValueError(f"{counts}: a split needs at least one sample, and a target for each")


def num_windows(num_tokens: int, *, seq_len: int) -> int:
    """Return the number of samples in a stream of `num_tokens`; the last token is only a target."""
    return max(0, num_tokens - 1) // seq_len


def contiguous_split(length: int, split: Split) -> slice:
    """Return the split's part of a stream of this length: the first 90 %, the next 5 % or the last 5 %."""
    bounds = [0, length * 90 // 100, length * 95 // 100, length]
    part = SPLITS.index(split)
    return slice(bounds[part], bounds[part + 1])
