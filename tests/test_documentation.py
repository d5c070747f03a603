"""What the documentation says is so: every command of every page is run, and must end, and say, as the page has it.

A command is run as it stands, but for what SHORTER and INSTEAD say; what cannot be run at all is in NOT_RUN, with the reason.
A page's commands are run in its order in one copy of the project, so that `runs/NAME/ID` is the newest run of that name. What
needs other machinery (a launcher, several nodes, Slurm) or takes long is slow, and is run in a copy of its own.
"""

import ast
import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from extras.mpi import mpi
from extras.mpi.tests.test_mpi import ALLOWED
from framework.config.compose import compose_line
from framework.data.published import DEBIAN
from tests.harness import Ended, files_below, typed, wait_for
from tests.launch.test_slurm import MISSING, ask, cluster  # noqa: F401  # a fixture
from tests.pages import MACHINE, PAGES, ROOT, Command, blocks, commands, files, project, with_ids
from tests.test_extend import PAGE as EXTEND
from tests.test_extend import steadfast
from tests.test_recipes import RECIPES
from tests.test_tutorial import WALKED

# What is appended to a command that has these words, if the page shows no output of it. Of a key the last counts.
SHORTER = {
    "train.py": ["trainer.max_steps=4"],
    "slurm/train.sbatch": ["trainer.max_steps=4"],
    "run.resume=runs/": ["trainer.max_steps=6"],
    "run.resume=file://": ["trainer.max_steps=6"],
    "trainer.profile=true": ["trainer.max_steps=8"],
    "trainer.compile=true": ["model.num_layers=1"],
    "dataset=text": ["dataset.seq_len=32", "model.dim=32", "model.num_layers=2"],
    "experiment=stdlib_gpt": ["dataset.seq_len=32", "model.dim=32", "model.num_layers=2"],
    "hydra/sweeper=": ["hydra.sweeper.n_trials=2"],
    "launch.nproc_per_node=8": ["launch.nproc_per_node=1"],
    **{f"experiment={name}": [*recipe.reduced, "trainer.max_steps=2"] for name, recipe in RECIPES.items()},
}
# What cannot be appended. {store} is one that the test serves.
INSTEAD = {
    "--nproc-per-node=8": "--nproc-per-node=1",
    "--gpus-per-node=8": "--gres=none",
    "launch.slurm.gpus_per_node=8": "launch.slurm.gpus_per_node=0",
    "--rdzv-endpoint=HOST:PORT --rdzv-id=NAME": "--rdzv-endpoint={store} --rdzv-id=name",
}
# How commands begin that are not run here, and why.
NOT_RUN = {
    "pip install": "CI does, in a new environment",
    "pytest": "it would run this, and CI does",
    "tests/install_debian.sh": "CI does, as root",
    ".ci/run": "it would run this",
}
# Commands with these words need other machinery, or take long: they are slow, and run alone in a copy of the project.
SLOW = ("torchrun", "mpirun", "sbatch", "launch=slurm", "launch.nnodes", "experiment=", "dataset=text", "parallel=pipeline", "nproc_per_node=4",
        "hydra", "mode=export", "trainer.compile=true", "logger=", 'eval "')  # fmt: skip
# How many times a command is given at once: a time for each node.
NODES = {"nnodes=1:2 ": 2, "nnodes=1:4 ": 2, "nnodes=4 ": 4}


def of_page(page: str) -> list[Command]:
    parts = [replace(command, line=part) for command in commands(page) for part in command.line.split(" && ")]
    return [command for command in parts if not command.line.startswith(tuple(NOT_RUN))]


EVERY = {page: of_page(page) for page in PAGES if page not in (EXTEND, *WALKED)}  # which have tests of their own


def is_slow(command: Command) -> bool:
    # into what a command before it has made, or with that
    follows = command.shown or command.line.startswith("cd ") or "dataset.tokenizer=" in command.line
    return not follows and any(word in command.line for word in SLOW)


def uses_slurm(command: Command) -> bool:
    return command.code == 0 and re.search("slurm|sbatch", command.line) is not None


@pytest.mark.slow
@pytest.mark.timeout(900)  # beside others
@pytest.mark.parametrize("page", [page for page in EVERY if not all(map(is_slow, EVERY[page]))])
def test_the_commands_of_a_page_run_in_its_order(page: str, tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    given: set[str] = set()
    for number, command in enumerate(EVERY[page]):
        if is_slow(command):
            continue
        ended = give(command, folder)
        if "finished already" in ended.output and command.line not in given and "run.resume" not in command.line:
            # one before it was the same run: it is to be seen doing it
            give(command, folder, f"name=again_{number}")
        given.add(command.line)


ALONE = list(dict.fromkeys(command for page in EVERY.values() for command in page if is_slow(command)))


@pytest.mark.slow
@pytest.mark.timeout(900)  # beside others
@pytest.mark.parametrize("command", [command for command in ALONE if not uses_slurm(command)], ids=str)
def test_a_command_that_takes_long_runs(command: Command, tmp_path: Path) -> None:
    give(command, prepared(command, tmp_path / "project"))


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here: slurm/local_cluster.sh install installs it")
@pytest.mark.parametrize("command", [command for command in ALONE if uses_slurm(command)], ids=str)
def test_a_command_for_slurm_runs_and_so_does_its_job(command: Command, tmp_path: Path, cluster: Path) -> None:  # noqa: F811
    folder = prepared(command, tmp_path / "project")
    give(command, folder)
    try:
        wait_for(lambda: not ask("squeue", "--noheader"), timeout_s=400, what="the end of its jobs")
    finally:
        ask("scancel", f"--user={psutil.Process().username()}")
    states = {path: json.loads(path.read_text())["status"] for path in folder.glob("runs/*/*/summary.json")}
    logs = "\n".join(path.read_text() for path in files_below(folder, "*.out"))
    assert states and set(states.values()) == {"finished"}, f"{states}\n{logs}"


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "command",
    [command for command in ALONE if re.search(r"train\.py (?!.*mode=|-|draw )|train\.py -m (?!.*mode=)", command.line)][::3],
    ids=str,
)
def test_nothing_is_wrong_with_a_command_that_takes_long(command: Command, tmp_path: Path) -> None:
    folder = prepared(command, tmp_path / "project")
    words = shlex.split(shorter(command.line).partition("train.py ")[2])
    ended = typed(*words, "mode=plan", directory=folder)
    assert ended.code == 0, f"{command}\n{ended.output}"


def prepared(command: Command, folder: Path) -> Path:
    """Return a copy of the project with what the command needs: data, and the files and runs that it names. Skip where it cannot be had."""
    if command.line.startswith("mpirun") and mpi.is_missing():
        pytest.skip(f"no MPI here: {mpi.INSTALL}")
    if "fashion_mnist" in command.line and not DEBIAN.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    folder = project(folder)
    for name, text in files(command.page).items():
        if f"={Path(name).stem}" in command.line:
            (folder / name).write_text(text)
    for name, recipe in RECIPES.items():
        if f"experiment={name}" in command.line:
            recipe.write(folder / compose_line([f"experiment={name}"]).config["dataset"]["root"])
    for name in re.findall(r"runs/(\w+)/ID", command.line):
        ended = typed(f"name={name}", "trainer.max_steps=4", directory=folder)
        assert ended.code == 0, ended.output
    return folder


def give(command: Command, folder: Path, *more: str) -> Ended:
    """Run a command in a folder, which must end, and say, as the page has it."""
    line = with_ids(command.line, folder)
    if not command.shown:
        line = shorter(line, *more)
    times = 1 if uses_slurm(command) else next((times for word, times in NODES.items() if word in line), 1)
    if times == 1 and re.fullmatch(r"python train\.py[^;&|()$]*", line):
        ended = typed(
            *shlex.split(line)[2:],
            directory=folder,
            timeout_s=300,  # beside others
            before=without_slurm if command.code and "slurm" in line else None,
        )
    else:
        ended = in_bash(line, folder, times=times)
    told = f"{command}\n{ended.output}"
    assert ended.code == command.code, f"exit {ended.code} instead of {command.code}: {told}"
    assert command.promises(ended.output), "\n".join(["it does not say", *command.shown, told])
    assert "Traceback" not in ended.output and "is off for the rest" not in ended.output, told
    return ended


def without_slurm() -> None:
    os.environ["PATH"] = ""


def shorter(line: str, *more: str) -> str:
    if re.search(r"train\.(py|sbatch)", line) is None or re.search(
        r" --(help|version|cfg|shell)|(mode=| )(eval|predict|export|report)( |$)|mode=status( run|$)| status runs", line
    ):
        return line
    for words, others in INSTEAD.items():
        line = line.replace(words, others)
    return " ".join([line, *(word for mark, added in SHORTER.items() if mark in line for word in added), *more])


def in_bash(line: str, folder: Path, *, times: int = 1) -> Ended:
    """Run a line of bash in a folder, so many times at once. Returns the worst code, and all that was said."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "tmp").mkdir(exist_ok=True)  # where a killed mpirun leaves its things
    environment = os.environ | ALLOWED | {
        "PATH": steadfast(folder / "bin")["PATH"], "PYTHONPATH": str(MACHINE), "TMPDIR": str(folder / "tmp")
    }  # fmt: skip
    processes = [
        subprocess.Popen(["bash", "-c", line.replace("{store}", f"127.0.0.1:{store.port}")], cwd=folder, env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        for _ in range(times)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(max(process.returncode for process in processes), "\n".join(outputs), folder / "runs")


# --- what the pages say beside the commands


def test_no_command_hides_in_a_block_of_another_kind() -> None:
    programs = ("python ", "torchrun ", "mpirun ", "pip ", "pytest", "sbatch ", "$ ")
    for page in PAGES:
        for language, text in blocks(page):
            assert language in ("bash", "console", "python", "yaml", ""), f"{page}: {language}"
            assert language in ("bash", "console") or not [line for line in text.splitlines() if line.startswith(programs)], (
                f"{page}: {text}"
            )


def test_ci_gives_the_commands_that_are_not_run_here() -> None:
    ci = [set(line.split()) for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    for words in ci:
        for name in [word for word in words if word.startswith("requirements")]:
            words |= set(re.findall(r"-r (\S+)", (ROOT / name).read_text()))
    parts = [part for page in PAGES for command in commands(page) for part in command.line.split(" && ")]
    for part in [part for part in parts if part.startswith(tuple(NOT_RUN)) and part != ".ci/run"]:
        assert any(set(part.split()) <= words for words in ci), f"{part}: .ci/run does not give it"


def leads_nowhere(page: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    found = ((ROOT / page).parent / path).resolve() if path else ROOT / page
    headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE) if anchor and found.exists() else []
    anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
    return not found.exists() or bool(anchor) and anchor not in anchors


def test_what_a_page_points_to_is_there() -> None:
    assert leads_nowhere("README.md", "docs/none.md") and leads_nowhere("README.md", "CONTRIBUTING.md#none")
    missing = []
    for page, text in PAGES.items():
        targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("https://")]
        named = re.findall(r"`(?:python )?((?:benchmarks|docs|extras|framework|models|tests)/[\w/.+-]+)`", text)
        missing += [f"{page}: {target}" for target in targets if leads_nowhere(page, target)]
        missing += [f"{page}: {name}" for name in named if not (ROOT / name).exists() and name not in files(page)]
    assert missing == []


def test_pictures_are_small_and_shown() -> None:
    pictures = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".png", ".svg")]
    scripts = " ".join(path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.py"))
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for picture in pictures:
        assert 0 < picture.stat().st_size < 200_000, picture
        assert any(f"{picture.name})" in text for text in (*PAGES.values(), results)), f"{picture} is on no page"
        assert picture.parent.name != "pictures" or picture.stem.partition("_")[0] in scripts, f"{picture}: what draws it?"


TROUBLE = "docs/troubleshooting.md"
ROWS = [re.split(r"\s*\|\s*", line.strip("| ")) for line in PAGES[TROUBLE].splitlines() if line.startswith("| `")]


def fixed(message: str) -> list[str]:
    """Return what of a message of the page is always the same: it has `...` for the rest."""
    return [piece for piece in (piece.strip(" ;:,") for piece in message.strip("`").split("...")) if len(piece) > 3]


@functools.cache
def texts(folder: Path) -> list[str]:
    """Return every text that stands in the sources of a folder, with `%s` and what an f-string fills in left out."""
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    constants = [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [part for text in constants for part in re.split(r"%[.\d]*[a-z]", text)]


def test_a_message_of_the_page_is_one_of_the_program_and_has_been_seen() -> None:
    said, seen = texts(ROOT / "framework") + texts(ROOT / "extras"), texts(ROOT / "tests") + texts(ROOT / "extras")
    rows = [row for row in ROWS if len(row) == 3]
    assert rows and all(fixed(row[0]) and all(row) for row in rows)
    assert [piece for row in rows for piece in fixed(row[0]) if not any(piece in text for text in said)] == [], "said nowhere"
    unseen = [
        row[0]
        for row in rows
        if not any(piece in text or (len(text) > 12 and text in piece) for piece in fixed(row[0]) for text in seen)
    ]
    assert unseen == [], "no test has seen them"


# How to have others say their messages: {port} is one that is taken.
OTHERS = {
    "operator torchvision::nms does not exist": "python -c 'import torch; torch.library.register_fake(\"torchvision::nms\")(print)'",
    "code: -98, name: EADDRINUSE, message: address already in use":
        "torchrun --nproc-per-node=2 --master-addr=127.0.0.1 --master-port={port} train.py parallel=ddp",
    "not enough slots available": "env -u PRTE_MCA_rmaps_default_mapping_policy mpirun -n 999 true",
    "has detected an attempt to run as root": "env -u OMPI_ALLOW_RUN_AS_ROOT mpirun -n 1 true",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("message", [row[0].strip("`") for row in ROWS if len(row) == 4])
def test_others_say_what_the_page_has_them_say(message: str, tmp_path: Path) -> None:
    if message == "out of shared memory":  # a small /dev/shm is not to be had without root
        assert message.encode() in (Path(torch.__file__).parent / "lib" / "libtorch_python.so").read_bytes()
        return
    line = OTHERS[message]
    if "mpirun" in line and mpi.is_missing() or "root" in message and os.geteuid() != 0:
        pytest.skip("no MPI here, or not root")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        ended = in_bash(line.format(port=taken.getsockname()[1]), project(tmp_path / "project"))
    assert ended.code != 0 and message in ended.output, ended.output
