"""The command line as a person has it: shells that complete, streams that are closed or full, packages that are missing."""

import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from framework import __version__
from framework.config.folders import CONF
from framework.config.help import help_text, version_text
from framework.config.overrides import parse
from framework.main import init, with_mode
from framework.runtime.exits import Exit
from framework.runtime.program import typed_override
from tests.harness import Says, typed
from tests.terminal import show
from tests.test_malformed import REPOSITORY

TRAIN = f"{sys.executable} {REPOSITORY / 'train.py'}"
TINY = "trainer.max_epochs=null trainer.max_steps=2 model.channels=[4]"


def shell(line: str, *, directory: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash, `train` being the command."""
    line = f'set -o pipefail; train() {{ {TRAIN} "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", line], cwd=directory, env=os.environ | env, text=True, capture_output=True, timeout=120
    )


def test_version_says_what_it_runs_with(tmp_path: Path) -> None:
    done = shell("train --version", directory=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, version_text(__version__) + "\n", "")
    assert re.fullmatch(r"Steadfast \d+\.\d+\.\d+, with torch \S+, hydra-core \S+, Python \S+", version_text(__version__))


ODD_TEXTS = ["a,b", "a b", "it's", 'a"b', "a\\'b", "a\\", "$HOME", "x${a}'", "精度", "true", "1e5", "2024", "", "!x", "a`b", " a", "~x",
             "a=b", "[a]", "a;b"]  # fmt: skip


def test_a_printed_override_is_read_as_its_text() -> None:
    for text in [*ODD_TEXTS, "runs/x", "../a/b-c_d.e"]:
        (word,) = shlex.split(typed_override("name", text))
        override = parse(word)
        assert override is not None and not override.is_sweep_override()
        assert OmegaConf.create({"name": override.value()}).name == text
        assert text in ODD_TEXTS or word == f"name={text}"  # a plain text has no quotes


def test_the_command_that_init_prints_enters_the_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "Mein Projekt é"
    assert init([str(folder)]) == 0
    command = capsys.readouterr().out.partition(": ")[2].partition(" && ")[0]
    assert shell(f"{command} && pwd", directory=tmp_path).stdout == f"{folder}\n"


# What a shell may do to the standard streams: the line, its exit code, its last line on stderr.
FULL = "standard output cannot be written: No space left on device"
STREAMS = {
    "train --help | true": (0, ""),
    "train mode=plan | true": (0, ""),
    "train --help > /dev/full": (Exit.DISK, FULL),
    "train hepl >&-": (Exit.CONFIGURATION, "hepl: is not key=value (key=value, or group=option)"),
    "train hepl >&- 2>&- <&-": (Exit.CONFIGURATION, ""),
    "PYTHONIOENCODING=ascii train --cfg job \"name='é'\"": (0, ""),
}  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("line", STREAMS)
def test_what_cannot_be_printed_is_no_traceback(line: str, tmp_path: Path) -> None:
    done = shell(line, directory=tmp_path)
    assert (done.returncode, done.stderr.rstrip("\n")) == STREAMS[line]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_does_not_need_its_streams(tmp_path: Path) -> None:
    done = shell(f"train {TINY} >&- 2>&- <&-", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("runs/*/*/train.log")
    assert "Traceback" not in log.read_text()
    for path in log.parent.glob("checkpoints/*/*"):
        assert b"step 2/2" not in path.read_bytes(), "what was printed has gone into a file that has the number of a stream"


@pytest.mark.parametrize("package", ["hydra", "torch"])
def test_a_package_that_is_missing_is_one_line(package: str, tmp_path: Path) -> None:
    hide = f"""
import sys, runpy
class Hidden:
    def find_spec(self, name, *_):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
sys.argv = ["train.py"]
runpy.run_path({str(REPOSITORY / "train.py")!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", hide],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        text=True,
        capture_output=True,
    )
    what = "pip install -r requirements.txt, or activate the environment that has it"
    assert done.stderr == f"No module named '{package}' in {sys.executable} ({what})\n"
    assert done.returncode == 1


COLOUR = re.compile(r"\x1b\[[\d;]*m")


@pytest.mark.slow
def test_no_colour_but_on_a_terminal_that_wants_it(tmp_path: Path) -> None:
    shown = show(["bash", "-c", f"NO_COLOR=1 {TRAIN} {TINY}"], directory=tmp_path, columns=100)
    assert shown.code == 0 and not COLOUR.search(shown.received.decode())
    done = shell(f"train {TINY} seed=9", directory=tmp_path, FORCE_COLOR="1")
    assert "\x1b" not in done.stdout + done.stderr


# What is typed before the Tab key, and what the shell then has on its line or below it.
COMPLETIONS = {
    "model=re": "model=resnet", "experiment=imagenet_": "experiment=imagenet_resnet50", "optimiz": "optimizer=",
    "trainer.max_st": "trainer.max_steps=", "model=vit model.pat": "model.patch_size=",
    "-m seed=1,2 parallel=param": "parallel=parameter-server",
}  # fmt: skip


@pytest.mark.slow
def test_bash_completes_groups_options_and_keys(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    bash = subprocess.Popen(["bash", "--norc", "-i"], cwd=REPOSITORY, stdin=follower, stdout=follower, stderr=follower,
                            env=os.environ | {"PATH": path, "TERM": "dumb", "HISTFILE": ""}, start_new_session=True)  # fmt: skip
    try:
        _typed(leader, 'eval "$(python train.py -sc install=bash)"; echo rea""dy\n', until="ready")
        for typed, wanted in COMPLETIONS.items():
            _typed(leader, f"python train.py {typed}\t\t\t", until=wanted)
            _typed(leader, "\x15echo ne''xt\n", until="next")  # Ctrl-U: an empty line
    finally:
        bash.kill()
        bash.wait()
        os.close(leader)
        os.close(follower)


def _typed(leader: int, keys: str, *, until: str) -> None:
    os.write(leader, keys.encode())
    printed, deadline = "", time.monotonic() + 30
    while until not in printed:
        assert select.select([leader], [], [], max(0.0, deadline - time.monotonic()))[0], f"no {until!r} in {printed!r}"
        printed += os.read(leader, 4096).decode()


def test_help_of_the_installed_command_names_no_train_py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/steadfast", "--help"])
    assert "train.py" not in help_text([]).replace("train.py ...", "") and "steadfast show RUN" in help_text([])


LEAVING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from framework.runtime.program import end_process
sys.stdout.write("written, ")
threading.Thread(target=lambda: (time.sleep(0.2), sys.stdout.write("a thread's end, "))).start()
atexit.register(sys.stdout.write, "at exit")
ThreadPoolExecutor().submit(time.sleep, 0).result()  # whose thread waits for more
class Late:
    def __del__(self): print("taken down")
late = Late()
end_process(3)
"""


def test_a_command_ends_with_all_that_it_has_to_say_but_is_not_taken_down(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LEAVING)
    path = {"PYTHONPATH": str(REPOSITORY)}
    ended = shell(f"{sys.executable} program.py", directory=tmp_path, **path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "written, a thread's end, at exit", "")
    profiled = shell(f"{sys.executable} -m cProfile program.py", directory=tmp_path, **path)
    assert "function calls" in profiled.stdout, "what runs the program goes on after it"


def test_a_command_that_waits_for_a_thread_names_it_and_a_signal_ends_it_with_its_own_code(tmp_path: Path) -> None:
    waiting = "threading.Thread(target=threading.Event().wait, name='of the user').start()"
    program = f"import threading; from framework.runtime.program import end_process; {waiting}; end_process(3)"
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, "program.py"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "waits for its thread of the user (daemon=True" in process.stderr.readline()
        process.terminate()
        assert process.wait(20) == 3


@pytest.mark.slow
def test_workers_that_wait_for_a_thread_name_it_and_a_signal_ends_the_command(tmp_path: Path) -> None:
    text = """import threading
from models.mlp import MLP
def net(in_channels, image_size, num_classes):
    threading.Thread(target=threading.Event().wait, name="of the user").start()
    return MLP(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
"""
    (tmp_path / "waits.py").write_text(text)
    line = "dataset=synthetic dataset.image_size=8 model._target_=waits.net trainer.max_epochs=null trainer.max_steps=1 rehearse=false"
    words = [sys.executable, str(REPOSITORY / "train.py"), *line.split(), "parallel=ddp", "launch.nproc_per_node=2"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        wait_for_line = iter(process.stdout.readline, "")
        assert any("waits for its thread of the user" in line for line in wait_for_line)
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.slow
def test_hashes_of_text_are_the_same_in_every_start(tmp_path: Path) -> None:
    line = "train dataset=synthetic dataset.image_size=8 model._target_=tests.faulty.OfHashes trainer.max_epochs=null trainer.max_steps=1 rehearse=false"
    env = {"PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": ""}
    assert "PYTHONHASHSEED" not in shell("unset PYTHONHASHSEED; env", directory=tmp_path, **env).stdout
    losses = set()
    for start in ("one", "two"):
        done = shell(f"unset PYTHONHASHSEED; {line} run.dir={start}", directory=tmp_path, **env)
        assert done.returncode == 0, done.stderr
        row = json.loads((tmp_path / start / "metrics.jsonl").read_text().splitlines()[-1])
        losses.add(row["loss"])
    assert len(losses) == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize(("variables", "words"), [
    ("PYTHONOPTIMIZE=2", "python -O: assert unset PYTHONOPTIMIZE"),
    ("RANK=1 WORLD_SIZE=2 MASTER_PORT=29500", "RANK: MASTER_ADDR unset RANK WORLD_SIZE"),
    ("LOCAL_RANK=1", "LOCAL_RANK: MASTER_ADDR unset LOCAL_RANK"),
])  # fmt: skip
def test_what_no_command_can_start_with_is_said_in_one_line_at_once(variables: str, words: str, tmp_path: Path) -> None:
    done = shell(f"export {variables}; train 'model={{_target_: a.Net, width: [1]}}' mode=plan", directory=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
    assert done.stderr == Says(words)


def test_python_need_not_search_the_folder_of_a_program(tmp_path: Path) -> None:
    done = shell("export PYTHONSAFEPATH=1; train --version; RANK=0 WORLD_SIZE=1 train --version", directory=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, 2 * (version_text(__version__) + "\n"), "")


@pytest.mark.parametrize(("words", "overrides"), [
    ("eval runs/one eval.split=val", ["mode=eval", "run.dir=runs/one", "eval.split=val"]),
    ("predict 0a1b", ["mode=predict", "run.dir=runs/one/0a1b2c3d"]),
    ("export 0a1b run.root=elsewhere", ["mode=export", "run.dir='0a1b'", "run.root=elsewhere"]),  # there is none: mode=export says so
    ("eval 'a run'", ["mode=eval", "run.dir='a run'"]),
    ("cancel 0a1b", ["mode=cancel", "run.dir=runs/one/0a1b2c3d"]),
    ("eval run.dir=x", ["mode=eval", "run.dir=x"]),
    ("status runs", ["mode=status", "run.root=runs"]),
    ("check model=mlp", ["mode=check", "model=mlp"]),
    ("model=mlp", ["model=mlp"]),
    ("", []),
])  # fmt: skip
def test_an_action_may_be_the_first_word(
    words: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "one" / "0a1b2c3d"
    run.mkdir(parents=True)
    (run / "summary.json").write_text("{}")
    (run / "config.yaml").write_text("name: one")
    monkeypatch.chdir(tmp_path)
    assert with_mode(shlex.split(words))[0] == overrides


def test_the_beginning_of_several_ids_is_no_run(tmp_path: Path) -> None:
    for run in (tmp_path / "runs" / "one" / name for name in ("0a1b2c3d", "0a1b2c3e")):
        run.mkdir(parents=True)
        (run / "summary.json").write_text("{}")
        (run / "config.yaml").write_text("name: one")
    ended = typed("eval", "0a1b", directory=tmp_path)
    assert ended.code == 65 and ended.output.startswith("run.dir: 0a1b names 2 runs: ")


def test_flags_come_before_or_after_an_action(tmp_path: Path) -> None:
    answers = [
        typed(*words, directory=tmp_path) for words in (["--config-dir", str(CONF), "show", "nothing"], ["show", "nothing"])
    ]
    assert [ended.code for ended in answers] == [65, 65] and answers[0].output == answers[1].output
