"""The header of a safetensors file that a stranger may have written: what it holds. torch is not imported."""

from pathlib import Path
from typing import NamedTuple

from framework.checkpoint.plain import Invalid, require_file
from framework.runtime.problem import shown


class Entry(NamedTuple):
    """A tensor of the file, by its header."""

    dtype: str  # as safetensors names it: F32, BF16, I64, ...
    shape: list[int]


def read_header(path: Path) -> dict[str, Entry]:
    """Return what a file holds. Raises Invalid unless it is a plain safetensors file, of ours or of root's.

    A link is followed, as whoever names the file has chosen it. safetensors itself refuses a header of an absurd
    length, and tensors that overlap, leave gaps or are of another size than their bytes.
    """
    from safetensors import SafetensorError, safe_open

    try:
        require_file(path.resolve())
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            header = {name: Entry(part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except SafetensorError as error:
        raise Invalid(f"is not a safetensors file: {shown(str(error))}") from None
    except OSError as error:
        raise Invalid(f"cannot be read ({error.strerror})") from None
    if odd := [name for name in header if not name.isprintable()]:
        raise Invalid(f"has a name that cannot be printed: {shown(odd[0])}")
    return header
