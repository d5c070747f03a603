"""Takes the pictures of docs/pictures: what a real pseudo-terminal shows of real commands, at 60, 80 and 120 columns.

`python docs/pictures/terminal.py` runs them in a temporary folder and writes an SVG for each. It needs what the tests need.
"""

import io
import os
import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.style import Style
from rich.text import Text

PICTURES = Path(__file__).resolve().parent
ROOT = PICTURES.parents[1]
sys.path.insert(0, str(ROOT))

from tests.terminal import Shown, show  # noqa: E402

_FORMAT = re.sub(
    r"@font-face \{\{.*?\}\}\n?", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL
)  # from a server: any monospaced one does
_NAMES = {"brown": "yellow"}  # pyte's names of colours, where rich's are others
_STEPS, _LATE = 200, 150  # of the runs, and when the picture of the live line is taken


def take(line: str, name: str, *, folder: Path, columns: int, live: str = "") -> None:
    """Write a picture of what a line of bash leaves, and one named `live` of a run under way."""
    pictures: dict[str, str] = {}

    def look(shown: Shown, _: int) -> None:
        step = re.search(rf"━.* (\d+)/{_STEPS} ", "\n".join(shown.screen.display))
        if live and live not in pictures and step is not None and int(step[1]) >= _LATE:
            pictures[live] = svg(shown, title=line)

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["bash", "-c", f"PS4='$ '; set -x; {line}"]  # bash prints the command, as if it had been typed
    shown = show(words, directory=folder, columns=columns, look=look, PATH=path)
    if shown.code or (live and not pictures):
        raise RuntimeError("\n".join([f"{line}: exit {shown.code}, or it was too quick", *shown.lines]))
    for file, text in {**pictures, **({name: svg(shown, title=line)} if name else {})}.items():
        (PICTURES / f"{file}.svg").write_text(text)
        print(PICTURES / f"{file}.svg")


def svg(shown: Shown, *, title: str) -> str:
    """Return the screen as a picture, without the empty lines at its end."""
    console = Console(record=True, file=io.StringIO(), width=shown.columns, force_terminal=True, color_system="truecolor")
    lines = [_text(shown.screen.buffer[row], shown.columns) for row in range(shown.rows)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for text in lines:
        console.print(text, soft_wrap=True)
    picture = console.export_svg(title=title, code_format=_FORMAT, unique_id="terminal")
    return "\n".join(text.rstrip() for text in picture.splitlines()) + "\n"


def _text(line: dict[int, pyte.screens.Char], columns: int) -> Text:
    chars = [line[column] for column in range(columns)]
    runs = groupby(chars, key=lambda char: Style(color=_colour(char.fg), bold=char.bold))
    return Text.assemble(*(("".join(char.data for char in run), style) for style, run in runs))


def _colour(name: str) -> str | None:
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return None if name == "default" else _NAMES.get(name, name.replace("bright", "bright_"))


RUN = f"python train.py trainer.max_steps={_STEPS}"
# Command, columns, the picture of its end, and of its live line: in this order, in one folder.
COMMANDS = [
    (RUN, 80, "end_80", "run_80"),
    (f"{RUN} seed=1", 60, "", "run_60"),
    (f"{RUN} seed=1 model=mlp", 120, "", "run_120"),
    ("python train.py mode=status", 60, "status_60", ""),
    ("python train.py mode=status", 80, "status_80", ""),
    ("python train.py model=mlp --help", 60, "help_60", ""),
]


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").symlink_to(ROOT / "train.py")
        for line, columns, end, live in COMMANDS:
            take(line, end, folder=folder, columns=columns, live=live)


if __name__ == "__main__":
    main()
