"""What a run finds where it is to write, and what of it it takes for its own."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.harness import Says, assert_same_bits, command, files_below, finished, refused
from tests.hosts import needs_hosts, own_mounts

RUN = ["model=mlp", "model.dim=4", "dataset=synthetic", "dataset.num_train=64", "global_batch_size=32", "trainer.log_every=1"]


@pytest.mark.parametrize(("name", "resume"), [(".ssh", "auto"), (".config.yaml", "never"), ("docs", "auto"), ("docs", "never")])
def test_a_directory_with_anything_that_is_no_run_s_is_not_taken(name: str, resume: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / name).mkdir(parents=True)
    said = refused(f"run.dir={home}", f"run.resume={resume}")
    assert said == f"run.dir: {home} is not a run's directory: it holds {name!r} (a new directory, which the run makes)\n"
    assert os.listdir(tmp_path) == ["home"] and os.listdir(home) == [name]


@pytest.mark.slow
def test_starting_over_leaves_what_a_user_has_put_into_the_directory(tmp_path: Path) -> None:
    first = finished(*RUN, "trainer.max_steps=2", root=tmp_path / "runs")
    mine = {".notes": "hidden", "notes.txt": "seen"}
    for name, text in mine.items():
        (first.directory / name).write_text(text)
    (first.directory / ".summary.json.0123456789abcdef").write_text("left by a killed process")
    directory = first.directory
    again = command(*RUN, "trainer.max_steps=2", "run.resume=never", root=tmp_path / "runs")
    assert again.code == 0, again.output
    aside = directory.with_name(f"{directory.name}.old-1")
    assert {name: (directory / name).read_text() for name in mine} == mine
    theirs = {path.name for path in aside.iterdir()}
    assert {"config.yaml", "checkpoints", "metrics.jsonl", "model.safetensors", "summary.json"} <= theirs
    assert not theirs & {*mine, "lock"}
    assert (aside / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


def test_the_working_directory_may_be_the_runs(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    line = [*RUN, "trainer.max_steps=2", "run.dir=."]
    for resume, said in (("auto", "finished: "), ("auto", "finished already"), ("never", "the earlier run is now in")):
        ended = command(*line, f"run.resume={resume}", root=tmp_path / "runs", before=lambda: os.chdir(here))
        assert ended.code == 0 and said in ended.output, ended.output
    assert (here / "model.safetensors").is_file() and (tmp_path / "here.old-1" / "model.safetensors").is_file()


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o007, 0o660)])
def test_every_file_has_the_permissions_that_the_user_gives_to_new_files(umask: int, mode: int, tmp_path: Path) -> None:
    run = finished(*RUN, "trainer.max_steps=2", root=tmp_path / "runs", before=lambda: os.umask(umask) and None)
    modes = {path.name: path.stat().st_mode & 0o777 for path in files_below(run.directory, "*")}
    assert "model.safetensors" in modes and "summary.json" in modes
    private = {"lock"}  # made with fewer permissions than the umask allows
    assert {name: bits for name, bits in modes.items() if bits != mode and name not in private} == {}


@pytest.mark.slow
def test_a_pipe_among_the_pictures_is_no_picture(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    for number in range(60):
        folder = tmp_path / "pictures" / "train" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 9, 9)).save(folder / f"{number}.png")
    line = ["dataset=image_folder", f"dataset.root={tmp_path / 'pictures'}", "dataset.image_size=8", "model=mlp", "model.dim=4",
            "global_batch_size=8", "trainer.max_steps=2"]  # fmt: skip
    without = finished(*line, root=tmp_path / "without")
    os.mkfifo(folder / "zz.png")
    assert_same_bits(finished(*line, root=tmp_path / "with"), without)


@needs_hosts
@pytest.mark.parametrize(("line", "code"), [(["launch.nproc_per_node=2", "parallel=ddp"], 78), ([], 0)])
def test_without_memory_to_share_several_processes_are_refused_in_a_line(line: list[str], code: int, tmp_path: Path) -> None:
    def enter() -> None:
        own_mounts()
        for words in ("--bind /dev/shm /dev/shm", "-o remount,bind,ro /dev/shm"):
            subprocess.run(["mount", *words.split()], check=True)

    ended = command(*RUN, "trainer.max_steps=2", *line, root=tmp_path / "runs", before=enter)
    assert ended.code == code, ended.output
    said = "launch.nproc_per_node: several processes, but /dev/shm cannot be used (Read-only file system) ..."
    assert not code or ended.output.splitlines() == [Says(said)]


def test_below_a_long_tmpdir_loader_processes_are_refused(tmp_path: Path) -> None:
    (folder := tmp_path / ("d" * 80)).mkdir()

    def there() -> None:
        tempfile.tempdir = str(folder)

    ended = command(*RUN, "dataset.num_workers=2", root=tmp_path / "runs", before=there)
    assert ended.code == 78 and ended.output == Says(
        "TMPDIR: ... loader processes need sockets below it ... dataset.num_workers=0)"
    )
