"""The pages of the documentation: the commands that they give, and what they promise of each."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MACHINE = ROOT / "tests" / "machine"  # on the path of every Python that a test starts (sitecustomize.py)
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        *sorted(ROOT.glob("*.md")),
        ROOT / "slurm" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(ROOT.glob("extras/*/README.md")),
    ]
}
_BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command of a page: a line of a `bash` block, or one after `$` in a `console` block, with the lines shown below it."""

    page: str
    line: str
    code: int  # what its comment says, as in `# exit 78`; else 0
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"

    def promises(self, output: str) -> bool:
        """Return whether the lines shown are among those of the output, in this order: `...` is anything, ID a run's id."""
        parts = [re.escape(line).replace(r"\.\.\.", ".*").replace("ID", "[0-9a-f]{12}") for line in self.shown]
        return re.search("(?s:.*)".join(f"^{part}$" for part in parts), output, re.MULTILINE) is not None


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the page's blocks: the language that it names (bash, console, python, yaml; none for other text), the text."""
    return _BLOCK.findall(PAGES[page])


def commands(page: str) -> list[Command]:
    return list(_commands(page))


def _commands(page: str) -> Iterator[Command]:
    for language, text in blocks(page):
        lines = re.sub(r"\\\n\s*", "", text).splitlines()
        if language == "bash":
            yield from (_command(page, line) for line in lines if line)
        elif language == "console":
            starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
            for start, end in zip(starts, [*starts[1:], len(lines)]):
                yield _command(page, lines[start][2:], tuple(lines[start + 1 : end]))


def _command(page: str, text: str, shown: tuple[str, ...] = ()) -> Command:
    line, *comment = re.split(r"\s+#\s", text, maxsplit=1)
    code = re.search(r"\bexit (\d+)", "".join(comment))
    return Command(page, line, int(code[1]) if code else 0, shown)


def project(folder: Path, *, page: str | None = None) -> Path:
    """Make a copy of the project, with the files that the page shows (each names itself in its first line), and return it."""
    for name in ("conf", "extras", "framework", "models", "slurm"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    for name, text in files(page).items() if page else ():
        assert not (folder / name).exists(), f"{name}: no edit anywhere"
        (folder / name).write_text(text)
    return folder


def files(page: str) -> dict[str, str]:
    found = [
        re.match(r"(?:# @package \S+\n)?# (\S+)\n", text) for language, text in blocks(page) if language in ("python", "yaml")
    ]
    return {match[1]: match.string[match.end() :] for match in found if match is not None}


def with_ids(line: str, folder: Path) -> str:
    """Put the id of the newest run of that name in the place of each `runs/NAME/ID`."""

    def newest(match: re.Match[str]) -> str:
        found = sorted(folder.glob(f"runs/{match[1]}/*/config.yaml"), key=lambda path: path.stat().st_mtime_ns)
        assert found, f"{line}: no command before it has made a run in runs/{match[1]}"
        return f"runs/{match[1]}/{found[-1].parent.name}"

    return re.sub(r"runs/(\w+)/ID\b", newest, line)
