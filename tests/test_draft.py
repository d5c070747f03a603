"""draft=true: one folder for what is only tried, and the same command as a run afterwards."""

import json
from pathlib import Path

import pytest

from tests.harness import Ended, refused, typed
from tests.test_loop import TINY

DRAFT = [*TINY, "trainer.max_epochs=null", "trainer.max_steps=3", "draft=true"]
NET = "from models.mlp import MLP\n\nclass Net(MLP):\n    scale = {}\n"


def steps(ended: Ended) -> int:
    assert ended.code == 0, ended.output
    return json.loads((ended.root / "draft" / "summary.json").read_text())["step"]


@pytest.mark.slow
def test_a_draft_replaces_the_last_one_with_other_code_and_keys_and_becomes_a_run(tmp_path: Path) -> None:
    own = [
        *[word for word in DRAFT if not word.startswith("model")],
        "model._target_=net.Net",
        "model.dim=8",
        "model.num_layers=1",
    ]
    for count, scale in ((3, 1), (2, 2)):
        (tmp_path / "net.py").write_text(NET.format(scale))
        ended = typed(*own, f"trainer.max_steps={count}", directory=tmp_path)
        assert steps(ended) == count and "a draft, which the next one replaces" in ended.output
        assert [path.name for path in ended.root.iterdir()] == ["draft"]
    run = typed("promote", "rehearse=false", directory=tmp_path)
    assert run.code == 0 and "draft=" not in run.output.splitlines()[0], run.output
    (promoted,) = run.root.glob("default/*/summary.json")
    assert json.loads(promoted.read_text())["step"] == 2
    again = typed(*[word for word in own if word != "draft=true"], "trainer.max_steps=2", "rehearse=false", directory=tmp_path)
    assert "finished already" in again.output


def test_what_is_not_a_draft_is_not_deleted(tmp_path: Path) -> None:
    plain = [word for word in DRAFT if word != "draft=true"]
    assert typed(*plain, "run.dir=runs/draft", "rehearse=false", directory=tmp_path).code == 0
    ended = typed(*DRAFT, directory=tmp_path)
    assert steps(ended) == 3 and "the earlier run is now in runs/draft.old-1" in ended.output
    assert (tmp_path / "runs" / "draft.old-1" / "summary.json").exists()


def test_there_must_be_a_draft_to_promote(tmp_path: Path) -> None:
    ended = typed("promote", directory=tmp_path)
    assert ended.code == 78 and ended.output.startswith("promote: runs/draft has no draft")


def test_a_mistake_in_a_draft_is_refused_as_in_a_run() -> None:
    assert "optimizer.lrr: unknown key" in refused(*DRAFT, "optimizer.lrr=1")
