"""On CPUs a step takes its memory from what the last one has freed: counted in pages that the kernel had to clear."""

import ctypes
import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.training.loop import Trainer
from tests.harness import Ended, around, assert_same_bits, finished

RUN = [
    "dataset=synthetic", "dataset.num_train=1024", "dataset.num_val=8", "dataset.num_test=8", "dataset.image_size=8",
    "model=mlp", "model.dim=1024", "model.num_layers=3", "global_batch_size=1024", "trainer.max_epochs=null", "trainer.max_steps=12",
    "trainer.eval_every=null", "checkpoint.every=null",
]  # fmt: skip


def counting(file: Path) -> Callable[[], None]:
    """Write down how many pages each step has faulted in."""

    def plant() -> None:
        for parameter in (-1, -3):  # malloc.h's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, if an earlier test has set them here
            ctypes.CDLL(None).mallopt(parameter, 1 << 17)
        counts = list[int]()

        def counted(train_step: Callable[..., object], *args: object, **options: object) -> object:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            result = train_step(*args, **options)
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            file.write_text(json.dumps(counts))
            return result

        around(Trainer, "train_step", counted)

    return plant


def faults(*line: str, root: Path) -> tuple[Ended, int]:
    """Return a run, and the page faults of its last steps."""
    ended = finished(*RUN, *line, root=root, before=counting(root.with_suffix(".json")))
    return ended, sum(json.loads(root.with_suffix(".json").read_text())[-6:])


@pytest.mark.slow
def test_a_step_uses_the_memory_that_the_last_one_has_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, few = faults(root=tmp_path / "kept")
    given_back, many = faults("launch.keep_freed_memory=false", root=tmp_path / "given_back")
    assert many > 1000 and few < many / 5
    assert_same_bits(kept, given_back)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")  # the user has settings of their own
    _, own = faults(root=tmp_path / "own")
    assert own > many / 5
