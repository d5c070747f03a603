"""The fingerprint of a split: what its samples are, in a few short texts, so that other data under the same command are found.

- Arrays and tensors in memory, also those that are attributes of the user's dataset: all their bytes. Of numbers with a
  fraction, also a weighted sum and the norm of 16 parts, once as they are and once, of up to a million of them, on a scale
  where small numbers count as large ones do: what a dataset has computed may be rounded differently on another machine.
- Lists and mappings of numbers and texts in the user's dataset, such as pairs of a path and a label: up to two million entries,
  of a longer one as many, evenly spaced. The folder that all paths have in common does not count.
- Tables of Arrow (also those of `datasets`) and pandas in the user's dataset: their columns of numbers, as arrays in memory,
  unless a table has more than 134 million values.
- Arrays that are mapped from a file: 64 blocks of 64 KiB, evenly spaced from the first to the last.
- Files that are decoded at each use: their names, the sizes of up to 2,000 of them, and the first 64 KiB of 64 of them.
- Samples that are fetched one by one: up to 8 of them, evenly spaced, as many as are fetched in a second;
  of a stream, its first.
- The numbers of the samples that a sampler draws for epoch 0: they show what it reads.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_128

from framework.data.order import Order
from framework.data.source import Files, Source
from framework.randomness import key, seeded

if TYPE_CHECKING:
    import torch

_BLOCK, _NUM_BLOCKS, _NUM_PARTS, _NUM_SIZES, _NUM_SAMPLES, _MOST_S = 1 << 16, 64, 16, 2_000, 8, 1.0
_ORDER = "the sampler's order"
_DEPTH, _MOST_ARRAYS = 3, 64  # of the objects inside a source whose arrays count, and of their arrays
_FEW, _MOST_ENTRIES = 16, 1_000_000  # of a list that may hold objects; of a list of numbers and texts
_MOST_IN_TABLE = 1 << 27  # values
_HASH = re.compile(r" ?\[?[0-9a-f]{32}.*")  # and the numbers after it
_TOLERANCE = 1e-5  # of a part's norm
_MOST_SCALED, _SMALLEST = 1 << 20, 1e-6  # numbers; a smaller one counts as zero


def fingerprint(source: Source, *, seed: int, order: Order | None = None) -> dict[str, str]:
    """Return the fingerprint of a loaded split, by what it is of. The draws of samples that are fetched depend on the seed.

    `order`: that of a sampler.
    """
    source = getattr(source, "selected_from", source)
    stored = islice(_stored(source, "", {}), _MOST_ARRAYS)
    found = {"length": str(len(source))}
    found |= {_short(name): one if isinstance(one, str) else _of_array(one) for name, one in stored}
    if isinstance(source, Files):
        found |= _of_files(list(source.paths))
    elif hasattr(source, "sample") or len(found) == 1:
        found |= _of_samples(source, seed=seed)
    return found if order is None else found | {_ORDER: _of_array(np.asarray(order.numbers(0)))}


def changes(before: Mapping[str, str], now: Mapping[str, str], *, but_for_rounding: bool) -> list[str]:
    """Return what differs, as in `length 100, now 90`. A sample, or an order, counts only if both fingerprints have it."""
    found = []
    for name in {**before, **now}:
        old, new = before.get(name, "none"), now.get(name, "none")
        is_same = old.partition(" ~ ")[0] == new.partition(" ~ ")[0] or (but_for_rounding and _rounds_to(old, new))
        if is_same or (name.startswith(("sample ", _ORDER)) and "none" in (old, new)):
            continue
        first, second = (_HASH.sub("", text) for text in (old, new))
        found.append(f"{name} has other content" if first == second else f"{name} {first}, now {second}")
    return found


def _rounds_to(before: str, now: str) -> bool:
    """Return whether two texts have the same kind of numbers, and the same sums and norms up to rounding."""
    (ours, _, first), (theirs, _, second) = before.partition(" ~ "), now.partition(" ~ ")
    numbers = [np.array(text.split(), dtype=np.float64).reshape(-1, 2) for text in (first, second)]
    if not first or ours.split("] ")[0] != theirs.split("] ")[0] or numbers[0].shape != numbers[1].shape:
        return False
    return bool((np.abs(numbers[0] - numbers[1]) <= _TOLERANCE * numbers[0][:, 1:] + 1e-30).all())


def _stored(owner: Any, path: str, seen: dict[int, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the arrays and tensors in an object, and in the objects in it, by their attributes' names; of a list, a text."""
    if id(owner) in seen:
        return
    seen[id(owner)] = owner
    if isinstance(owner, np.ndarray) or _is_tensor(owner):
        yield path, owner
    elif (columns := _columns(owner)) is not None:
        for name, column in columns:  # two may have one name
            kind = str(getattr(column, "type", None) or column.dtype)
            if kind.startswith(("int", "uint", "float", "double", "bool")):
                yield f"{path}.{name}", column.to_numpy()
    elif isinstance(owner, (list, tuple, dict)) and len(owner) > _FEW and (text := _of_plain(owner)):
        yield path, text
    elif depth < _DEPTH and not isinstance(owner, type):
        inner: Mapping[Any, Any] = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        if isinstance(owner, (list, tuple)) and len(owner) <= _FEW:
            inner = dict(enumerate(owner))
        for name, value in inner.items():
            yield from _stored(value, f"{path}.{name}".strip("."), seen, depth + 1)


def _of_plain(owner: Any) -> str:
    """Return the number of the entries of a list or a mapping, and their content; "" unless they are numbers and texts."""
    entries = [*owner.items()] if isinstance(owner, dict) else owner
    entries = entries[:: max(1, len(entries) // _MOST_ENTRIES)]
    few = [entries[number] for number in _spread(len(entries), _NUM_BLOCKS)]
    try:
        text, of_few = (json.dumps(some, default=_as_plain) for some in (entries, few))
    except (TypeError, ValueError, RecursionError):
        return ""
    paths = [os.path.dirname(leaf) for leaf in map(str, _leaves(json.loads(of_few))) if leaf.startswith("/")]
    common = json.dumps(os.path.commonpath(paths))[:-1] if paths else ""
    text = text.replace(common, '"') if common else text
    return f"{len(owner)} entries {xxh3_128(text.encode()).hexdigest()}"


def _as_plain(value: Any) -> Any:
    """Return a path or a number of numpy as plain data."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(type(value).__name__)


def _columns(owner: Any) -> list[tuple[Any, Any]] | None:
    """Return the columns of a table by their names: none, if it is too large to be read. Return None for another object."""
    kind = type(owner)
    if kind.__name__ not in ("Table", "DataFrame") or kind.__module__.split(".")[0] not in ("pyarrow", "pandas"):
        return None
    if owner.shape[0] * owner.shape[1] > _MOST_IN_TABLE:
        return []
    return [*owner.items()] if kind.__name__ == "DataFrame" else [*zip(owner.column_names, owner.columns)]


def _of_array(array: Any, *, num_parts: int = _NUM_PARTS) -> str:
    """Return an array's type and shape, and its content: `uint8 [9, 8] HASH`, `float32 [9] HASH ~ SUM NORM ...`."""
    kind = _short(f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}")
    try:
        if _is_tensor(array):
            content, numbers = _of_tensor(array)
        else:
            numbers = array if array.dtype.kind not in "fc" else np.ascontiguousarray(array)
            content = _hash(numbers)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # sparse, on no device, of a type torch has not
        return kind
    if numbers.dtype.kind not in "fc":
        return f"{kind} {content}"
    numbers = numbers.reshape(-1).view(numbers.real.dtype)
    numbers = numbers.astype(np.promote_types(numbers.dtype, np.float32), copy=False)
    some = numbers
    if len(numbers) > _MOST_SCALED:
        some = numbers[np.sort(np.random.RandomState(0).randint(len(numbers), size=_MOST_SCALED))]
    with np.errstate(all="ignore"):
        scaled = np.arcsinh(some.astype(np.float64) / _SMALLEST)
        pairs = [*_sums_and_norms(numbers, num_parts), *_sums_and_norms(scaled, num_parts)]
    return f"{kind} {content} ~ {' '.join(f'{float(number):.9g}' for pair in pairs for number in pair)}"


def _sums_and_norms(numbers: np.ndarray, num_parts: int) -> Iterator[tuple[float, float]]:
    length = max(1, -(-len(numbers) // num_parts))
    weights = np.linspace(0.5, 1.5, length, dtype=numbers.dtype)  # the order counts too
    for part in (numbers[start : start + length] for start in range(0, len(numbers), length)):
        yield part @ weights[: len(part)] / len(part) ** 0.5, float(np.linalg.norm(part))


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor. A process that has not imported torch has none, and must not import it for this."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def _of_tensor(tensor: "torch.Tensor") -> tuple[str, np.ndarray]:
    """Return the hash of a tensor's bytes, and its numbers in a type that numpy has."""
    import torch

    numbers = tensor.detach().cpu().contiguous()
    content = _hash(numbers.reshape(-1).view(torch.uint8).numpy())
    is_rounded = numbers.is_floating_point() or numbers.is_complex()
    return content, (numbers.to(torch.promote_types(numbers.dtype, torch.float32)) if is_rounded else numbers).numpy()


def _hash(array: np.ndarray) -> str:
    hashed = xxh3_128()
    if array.dtype.hasobject:  # of other objects, a text may have an address
        some = array.reshape(-1)[:: max(1, array.size // 1_000_000)]
        plain = [item if isinstance(item, (str, bytes, int, float)) else type(item).__name__ for item in some]
        hashed.update(repr(plain).encode())
    else:
        content = (array if isinstance(array, np.memmap) else np.ascontiguousarray(array)).reshape(-1).view(np.uint8)
        is_mapped = isinstance(array, np.memmap)
        for start in _spread(max(1, len(content) - _BLOCK + 1), _NUM_BLOCKS) if is_mapped else [0]:
            hashed.update(content[start : start + _BLOCK if is_mapped else None].data)
    return hashed.hexdigest()


def _short(text: str) -> str:
    """Return a text as a checkpoint may hold it."""
    return (text if text.isprintable() else repr(text))[:300]


def _spread(length: int, count: int) -> list[int]:
    """Return up to `count` of the numbers below `length`, evenly spaced, with the first and the last."""
    return sorted({round(place) for place in np.linspace(0, length - 1, min(count, length))})


def _of_files(paths: list[str]) -> dict[str, str]:
    folders = {folder: os.path.abspath(folder) for folder in {path.rpartition("/")[0] for path in paths}}
    common = os.path.commonpath(folders.values())
    below = {folder: os.path.relpath(path, common) for folder, path in folders.items()}
    names, sizes, contents = xxh3_128(), xxh3_128(), xxh3_128()
    for folder, _, name in (path.rpartition("/") for path in paths):
        names.update(f"{below[folder]}/{name}\0".encode(errors="surrogateescape"))
    for number in _spread(len(paths), _NUM_SIZES):
        with suppress(OSError):  # the loader names a file that cannot be read
            sizes.update(f"{os.stat(paths[number]).st_size} ".encode())
    for number in _spread(len(paths), _NUM_BLOCKS):
        with suppress(OSError), open(paths[number], "rb") as file:
            contents.update(file.read(_BLOCK))
    return {"names": names.hexdigest(), "sizes": sizes.hexdigest(), "contents": contents.hexdigest()}


def _of_samples(source: Any, *, seed: int) -> dict[str, str]:
    fetch = source.sample if hasattr(source, "sample") else lambda number: source.gather(np.array([number]))
    found, until = dict[str, str](), time.monotonic() + _MOST_S
    first, *others = _spread(len(source), _NUM_SAMPLES)
    some = range(min(len(source), _NUM_SAMPLES)) if hasattr(source, "is_stream") else [first, *others[::-1]]
    for number in some:
        with suppress(Exception), seeded(key(seed, "fingerprint", number)):  # a damaged sample is the loader's matter
            found[f"sample {number}"] = of_sample(fetch(number))
        if time.monotonic() > until:
            break
    return found


def of_sample(sample: Any) -> str:
    """Return the types and the content of a sample, as in `[HASH] HASH ~ SUM NORM ...`."""
    kinds, exact, rounded = xxh3_128(), xxh3_128(), list[str]()
    for value in _leaves(sample):
        if isinstance(value, (np.ndarray, np.generic, float)) or _is_tensor(value):
            text = _of_array(value if _is_tensor(value) else np.asarray(value), num_parts=1)
            text, _, numbers = text.partition(" ~ ")
            rounded += [numbers] if numbers else []
            kinds.update(text.rpartition(" ")[0].encode() if numbers else text.encode())
            exact.update(text.encode())
        else:
            for hashed in (kinds, exact):
                hashed.update(repr(value.tobytes() if hasattr(value, "tobytes") else value).encode())
    return f"[{kinds.hexdigest()}] {exact.hexdigest()}" + (f" ~ {' '.join(rounded)}" if rounded else "")


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (Mapping, list, tuple)):
        for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield str(name)
            yield from _leaves(value)
    else:  # of an object that is no data, only its type
        is_data = isinstance(tree, (str, bytes, int, float, complex, type(None), np.ndarray, np.generic))
        yield tree if is_data or _is_tensor(tree) or hasattr(tree, "tobytes") else type(tree).__name__
