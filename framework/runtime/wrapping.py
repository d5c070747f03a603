"""Text in the columns of a terminal, in which some letters (Chinese, Japanese, Korean) need two columns."""

import textwrap


def columns_of(text: str) -> int:
    """Return the columns that a terminal needs for a text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def wrapped(text: str, width: int, *, first: str = "", other: str = "") -> list[str]:
    """Wrap a text at its spaces. `first` and `other` are the indents of the first line and of the other lines."""
    spread = "".join(letter + "\0" * (columns_of(letter) - 1) for letter in text)  # textwrap counts letters, not columns
    lines = textwrap.wrap(spread, width, initial_indent=first, subsequent_indent=other, break_long_words=False,
                          break_on_hyphens=False)  # fmt: skip
    return [line.replace("\0", "") for line in lines]
