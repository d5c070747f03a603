"""docs/tutorial.md and docs/migration.md, word by word: their files and commands, in their order, in one empty folder."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from framework.cli.run import checked_line
from tests.harness import typed
from tests.pages import MACHINE, PAGES, ROOT, Command, blocks, commands, with_ids
from tests.test_extend import steadfast

TUTORIAL, MIGRATION = WALKED = "docs/tutorial.md", "docs/migration.md"
NAMED = r"(?:# @package \S+\n)?# (\S+)\n"  # the head of a block that is a file, word by word
SHORTER = ["trainer.max_epochs=2", "trainer.eval_every=16"]


def steps(text: str) -> list[Path | str]:
    """Return what the page does, in order: a file that it writes, or a command's line."""
    found: list[Path | str] = []
    for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL):
        if language in ("python", "yaml") and (name := re.match(NAMED, block)):
            found.append(Path(name[1]))
        elif language in ("bash", "console"):
            found += [line.removeprefix("$ ") for line in block.splitlines() if language == "bash" or line.startswith("$ ")]
    return found


def test_the_page_has_files_and_commands_of_every_step() -> None:
    found = steps(PAGES[TUTORIAL])
    assert [step for step in found if isinstance(step, Path)] == [
        Path("spirals.py"), Path("conf/dataset/spirals.yaml"), Path("net.py"), Path("robust.py"), Path("conf/task/robust.yaml"),
        Path("conf/experiment/paper.yaml"), Path("figure.py"),
    ]  # fmt: skip
    lines = " ".join(step for step in found if isinstance(step, str))
    assert all(word in lines for word in ("adopt", " -m ", "mode=report", "nproc_per_node=2", "why", "mode=export"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # beside others
def test_the_tutorial_word_by_word(tmp_path: Path) -> None:
    follow(TUTORIAL, tmp_path, "rehearse=false")  # `adopt` rehearses the model
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert len([*tmp_path.glob("runs/paper/*/model.safetensors")]) == 18


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_was_written_for_another_trainer_trains(tmp_path: Path) -> None:
    follow(MIGRATION, tmp_path)
    assert len([*tmp_path.glob("runs/*/*/model.safetensors")]) == len(commands(MIGRATION)) == 4


KEY = r"[a-z_]+(?:\.[a-z_]+)*"


def settings() -> list[tuple[str, str, set[str]]]:
    """Return each setting of another trainer in the tables, with a value, and our keys in the right column."""
    found = []
    for left, right in re.findall(r"^\| (.*) \| (.*) \|$", PAGES[MIGRATION].partition("\n## Compared")[0], re.MULTILINE):
        ours = {key for code in re.findall(r"`([^`]*)`", right) for key in re.findall(rf"{KEY}(?==)|^{KEY}$", code)}
        for code in re.findall(r"`([^`]*)`", left):
            found += [(name, value or "x", ours) for name, value in re.findall(rf"(?<![\w./])({KEY})=\"?([\w-]*)", code)]
    return found


def test_the_message_for_another_trainer_s_setting_names_our_key() -> None:
    waiting = settings()
    names = {name for name, _, _ in waiting}
    assert names >= {"gradient_clip_val", "algorithms", "paths.data_dir", "save_folder", "parallelism_config", "trainer"}
    while waiting:  # a line has one value of each name
        line = {name: value for name, value, _ in waiting}
        problems = checked_line([f"{name}={value}" for name, value in line.items()]).problems
        said = {problem.key: set(re.findall(KEY, problem.expected)) for problem in problems}
        for name, value, ours in waiting:
            assert value != line[name] or name in ours or said[name] & ours, (name, problems)
        waiting = [(name, value, ours) for name, value, ours in waiting if value != line[name]]


def follow(page: str, folder: Path, *more: str) -> None:
    texts = {
        match[1]: text for language, text in blocks(page) if language in ("python", "yaml") and (match := re.match(NAMED, text))
    }
    known = {command.line: command for command in commands(page)}
    for step in steps(PAGES[page]):
        if isinstance(step, Path):
            (folder / step).parent.mkdir(parents=True, exist_ok=True)
            (folder / step).write_text(texts[str(step)])
        else:
            give(known[re.split(r"\s+#\s", step)[0]], folder, *more)


def give(command: Command, folder: Path, *more: str) -> None:
    program, *words = shlex.split(with_ids(command.line, folder))
    if program == "python":
        done = subprocess.run(command.line, shell=True, cwd=folder, text=True, env=steadfast(folder / ".bin") | {"PYTHONPATH": f"{ROOT}:{MACHINE}"},
                              capture_output=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert command.promises(done.stdout), f"{command}\n{done.stdout}"
        return
    assert program == "steadfast"
    is_training = not command.shown and "mode=" not in command.line
    ended = typed(*words, *([*SHORTER, *more] if is_training else []), directory=folder, timeout_s=600)
    assert ended.code == command.code, f"{command}\n{ended.output}"
    assert command.promises(ended.output), f"{command}\n{ended.output}"
