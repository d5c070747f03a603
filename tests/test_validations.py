"""Several validation sets: each is measured, and any of them can be monitored, on any number of processes and after a kill."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import assert_close, command, finished, refused
from tests.test_any_data import MAP, RUN, TWO
from tests.test_resume import after_step, crash

PICTURES = "_target_: tests.test_any_data.Pictures"
SETS = [f"dataset.val.clean={{{PICTURES}, size: 11}}", f"dataset.val.noisy={{{PICTURES}, size: 15}}", "micro_batch_size=3"]


def test_each_set_has_rows_and_any_is_the_monitor_also_on_two_processes_and_after_a_kill(tmp_path: Path) -> None:
    line = [*RUN, *MAP, *SETS, "checkpoint.monitor=val.noisy/loss", "trainer.early_stopping.monitor=val.noisy/loss",
            "trainer.early_stopping.patience=9"]  # fmt: skip
    one = finished(*line, root=tmp_path / "one")
    splits = [row["split"] for row in one.rows]
    assert splits.count("val") == splits.count("val.noisy") == 3 and splits.count("test") == 1
    assert one.summary["monitor"] == "val.noisy/loss"
    noisy = [row["loss"] for row in one.rows if row["split"] == "val.noisy"]
    assert one.summary["metrics"]["val.noisy"]["best"]["loss"] == min(noisy)
    assert command(*line, root=tmp_path / "cut", before=after_step(5, crash)).code < 0
    assert_close(finished(*line, "parallel=ddp", TWO, root=tmp_path / "cut"), one)
    (first,) = (row for row in one.rows if row["split"] == "val" and row["step"] == 7)
    alone = finished(*RUN, *MAP, "micro_batch_size=3", f"dataset.val={{{PICTURES}, size: 11}}", root=tmp_path / "alone")
    assert first["loss"] == [row["loss"] for row in alone.rows if row["split"] == "val"][-1], "the first set is the split val"
    evaluated = command("mode=eval", f"run.dir={one.directory}", "eval.split=val.noisy", root=tmp_path / "eval")
    assert evaluated.code == 0 and re.search(r"val\.noisy .* 15 ", evaluated.output), evaluated.output


def test_what_is_wrong_with_a_set_is_named_by_its_key() -> None:
    wrong = [*MAP, *SETS, f"dataset.val.noisy={{{PICTURES}, sise: 15}}"]
    assert "dataset.val.noisy.sise: unknown key (did you mean dataset.val.noisy.size?)" in refused(*RUN, *wrong)
    said = refused(*RUN, *MAP, *SETS, "checkpoint.monitor=val.noizy/loss")
    assert "checkpoint.monitor: 'val.noizy/loss' is not valid" in said and "val.noisy/loss" in said
    assert "(dataset.val._target_=tests.test_any_data.Pictures)" in refused(
        *RUN, *MAP, "dataset.val=tests.test_any_data.Pictures"
    )
    assert "dataset.val: has names (each with" in refused(*RUN, *MAP, *SETS, "dataset.folds=3", "dataset.fold=0")


@pytest.mark.slow
def test_a_set_is_fetched_and_measured_before_the_start_and_may_have_nodes_in_it(tmp_path: Path) -> None:
    class_of = "_target_: tests.test_validations.Changed, data: {_target_: tests.test_any_data.Pictures, size: 11}"
    finished(*RUN, *MAP, f"dataset.val={{{class_of}}}", "rehearse=true", root=tmp_path / "one")
    broken = [f"dataset.val.good={{{class_of}}}", f"dataset.val.bad={{{class_of}, width: 5}}"]
    assert "cannot be multiplied" in refused(*RUN, *MAP, *broken, "rehearse=true")
    assert "its split val.bad cannot be fetched" in refused(
        *RUN, *MAP, f"dataset.val.good={{{class_of}}}", f"dataset.val.bad={{{PICTURES}, damaged: 0}}", "rehearse=true"
    )


class Changed:
    """A dataset with another in it, and with samples of another width."""

    def __init__(self, data: Any, width: int = 12) -> None:
        self.data, self.width = data, width

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        picture, label = self.data[index]
        return picture[: self.width], label
