"""What parts log besides numbers: files that are a function of the run, and the same in every logger that can show them."""

import csv
import errno
import io
import json
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extras.loggers.tests.records import OFFLINE, tensorboard_events, wandb_files, wandb_records
from framework.distributed.world import World
from framework.loggers.sink import RunInfo, replay
from framework.runs.directory import RunDirectory
from framework.runs.media import Media, list_media, remove_media, write_media
from framework.training import encoding, recorder
from framework.training.recorder import Recorder
from tests.harness import Ended, Says, command, finished, refused
from tests.test_loggers import DDP, RUN
from tests.test_resume import after_step, crash

PART = "+part.media._target_=tests.own_parts.Media"
EVALUATED = (5, 10, 15, 16)


def contents(run: Ended) -> dict[str, bytes]:
    folder = run.directory / "media"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps_in_tensorboard(directory: Path) -> dict[str, list[int]]:
    """Return the steps of each tag as TensorBoard's server reads them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    return {tag: [event.step for event in reader.Tensors(tag)] for tag in reader.Tags()["tensors"]}


@pytest.mark.slow
def test_media_are_the_same_files_after_a_kill_and_in_the_loggers_each_step_once(tmp_path: Path) -> None:
    line = [*RUN, *DDP, PART, *OFFLINE, "logger=[tensorboard,wandb]", "launch.max_restarts=0"]
    whole = finished(*RUN, *DDP, PART, root=tmp_path / "whole")
    killed = command(*line, root=tmp_path / "killed", before=after_step(11, crash))
    assert killed.code != 0 and "val/text/step_00000010.txt" in contents(killed)
    (killed.directory / "media" / "val" / "text" / "step_00000014.txt").write_text("of a step that comes again without it")
    (killed.directory / "media" / "val" / "text" / ".step_00000010.txt.0a1b").write_text("of a file that was not finished")
    run = finished(*line, root=tmp_path / "killed")
    names = {f"{name}/step_{step:08d}.{suffix}" for step in EVALUATED for name, suffix in (
        ("val/curve", "png"), ("val/colors", "png"), ("val/tone", "wav"), ("val/words", "csv"), ("val/text", "txt"))}  # fmt: skip
    assert "WARNING" not in run.output and contents(run) == contents(whole)
    assert contents(run).keys() == names | {f"of_step/step_{step:08d}.png" for step in range(1, 17)}
    loss = {row["step"]: row["loss"] for row in run.rows if row["split"] == "val"}[16]
    assert contents(run)["val/text/step_00000016.txt"] == f"the loss is {loss}\n".encode()

    steps = steps_in_tensorboard(run.directory)
    for name in ("curve", "colors", "tone", "words/text_summary", "text/text_summary"):
        assert steps[f"val/{name}"] == list(EVALUATED), name
    assert steps["of_step"] == list(range(1, 17))
    shown = tensorboard_events(run.directory)
    pixels = np.asarray(Image.open(io.BytesIO(shown.Images("val/colors")[-1].encoded_image_string)).convert("RGB"))
    assert (pixels == np.asarray(Image.open(run.directory / "media/val/colors/step_00000016.png"))).all()
    (text,) = shown.Tensors("val/words/text_summary")[-1].tensor_proto.string_val
    assert text.decode().splitlines()[2] == "| 0 | a, b |"

    held: dict[tuple[str, int], Any] = {}
    for record in wandb_records(wandb_files(run.directory)[-1]):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            held |= {(name, row["_step"]): value for name, value in row.items()}
    types = {"curve": "image-file", "colors": "image-file", "tone": "audio-file", "words": "table-file", "text": "html-file"}
    for name, kind in types.items():
        for step in EVALUATED:
            found = held.get((f"val/{name}", step)) or {"_type": held[f"val/{name}/_type", step]}
            assert found["_type"] == kind


def test_a_task_logs_as_a_part_of_the_loop(tmp_path: Path) -> None:
    line = [*RUN, "task._target_=tests.own_parts.LoggingTask", "rehearse=true", "trainer.max_epochs=1"]
    run = finished(*line, root=tmp_path / "runs")
    loss = {row["split"]: row["loss"] for row in run.rows}
    files = {f"{split}/loss/step_00000004.txt": str(loss[split]).encode() for split in ("val", "test")}
    assert contents(run) == files


REFUSED = {
    "early": "part.media.early: logged in begun(), when the run's step is not known yet ...",
    "image": "part.media.val/colors: an image of shape [8, 2, 2, 2] and torch.bfloat16 ... uint8 ...",
    "audio": "part.media.val/tone: sound of shape [3, 80] ...",
    "table": "part.media.val/words: row 0 of a table has 1 values, and there are 2 columns ...",
    "name": "part.media.'../text' is no name of media ...",
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_be_logged_is_refused_before_the_start(wrong: str) -> None:
    assert refused(*RUN, PART, f"+part.media.wrong={wrong}", "rehearse=true").splitlines()[-1] == Says(REFUSED[wrong])


def pixels_of(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


def test_pictures_keep_their_pixels_in_each_layout() -> None:
    colors = torch.arange(2 * 5 * 3, dtype=torch.uint8).reshape(2, 5, 3)
    for layout in (colors, colors.movedim(2, 0), colors.numpy(), colors.movedim(2, 0)[None]):
        assert (pixels_of(encoding.png_of_pixels(layout)) == colors.numpy()).all()
    for gray in (colors[..., 0], colors[..., :1], colors[None, ..., 0]):
        assert (pixels_of(encoding.png_of_pixels(gray)) == colors[..., :1].numpy()).all()
    floats = torch.tensor([[0.0, 1.0, 0.5], [-3.0, 7.0, math.nan]], requires_grad=True)
    for of in (floats, floats.to(torch.bfloat16), floats.detach().double().numpy()):
        assert pixels_of(encoding.png_of_pixels(of))[..., 0].tolist() == [[0, 255, 128], [0, 255, 0]]
    grid = pixels_of(encoding.png_of_pixels(torch.ones(10, 3, 4, 4)))
    assert grid.shape == (2 * 6 + 2, 8 * 6 + 2, 3) and grid.max() == 255
    for wrong in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2, 2, 2), torch.zeros(3), torch.zeros(0, 3)):
        with pytest.raises(ValueError, match="an image of "):
            encoding.png_of_pixels(wrong)


def test_sounds_and_tables_are_read_back() -> None:
    stereo = np.array([[0, 1, 2], [-1, -2, -32768]], dtype=np.int16)
    with wave.open(io.BytesIO(encoding.wav_of_samples(stereo, rate=16000))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 16000, 3)
        assert (stereo == np.frombuffer(file.readframes(3), "<i2").reshape(3, 2).T).all()
    with wave.open(io.BytesIO(encoding.wav_of_samples(np.array([0.0, 1.0, -9.0]), rate=8000))) as file:
        assert np.frombuffer(file.readframes(3), "<i2").tolist() == [0, 32767, -32767]
    content = encoding.csv_of_rows(["a", "b"], [[1, 'x,"\n'], [2.5, None]]).decode()
    assert list(csv.reader(io.StringIO(content))) == [["a", "b"], ["1", 'x,"\n'], ["2.5", ""]]


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told = Recorder(RunDirectory(tmp_path), world=World.alone(), sinks={})
    told.open(RunInfo(tmp_path, "b", "a", 0, 10, {}))
    monkeypatch.setattr(recorder, "write_media", refuse)
    monkeypatch.setattr(recorder.LOGGER, "propagate", True)
    told.log_media("val/text", b"text", suffix=".txt", step=3)
    told.close(status="finished")
    assert caplog.messages == ["val/text of step 3 could not be written: No space left on device"]


def test_a_sink_takes_rows_and_media_again_in_the_order_of_the_steps(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    for step, name in ((3, "b"), (1, "val/a"), (3, "a"), (7, "a")):
        write_media(folder, name, b"text", suffix=".txt", step=step)
    (folder / "a" / "step_1.txt.part").touch()
    (folder / "a" / "step_00000002.txt").symlink_to("/etc/passwd")
    rows = [{"step": step, "split": "train", "loss": 1.0, "list": [1]} for step in (1, 2, 4, 8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Sink:
        def __init__(self) -> None:
            self.taken: list[Any] = []

        def log(self, row: dict[str, Any]) -> None:
            self.taken.append((row["step"], len(row)))

    class Shows(Sink):
        def media(self, item: Media) -> None:
            self.taken.append((item.step, item.name))

    run = RunInfo(tmp_path, "b", "a", 7, 10, {})
    plain, shows = Sink(), Shows()
    replay(plain, run, first=2)
    replay(shows, run, first=2)
    assert plain.taken == [(2, 3), (4, 3)]
    assert shows.taken == [(2, 3), (3, "a"), (3, "b"), (4, 3), (7, "a")]
    remove_media(folder, after=1)
    assert [(item.step, item.name, item.kind) for item in list_media(folder)] == [(1, "val/a", "text")]
