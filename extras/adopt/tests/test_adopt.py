"""`python -m extras.adopt MODULE:MODEL`: the file it writes, and its word on each strategy, which a run then keeps."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extras.adopt import __main__ as program
from tests.harness import typed
from tests.test_loop import TINY

SMALL = [word for word in TINY if not word.startswith("model")] + ["trainer.max_steps=2"]

NET = '''
from torch import nn


class OddNet(nn.Module):
    """Layers one after the other, in a list."""

    def __init__(self, in_channels, image_size, num_classes, hidden=12, act=nn.ReLU, drop: float = 0.5, widths=[3, 4],
                 fill="${a}", unknown=["???"]):
        super().__init__()
        assert (fill, unknown) == ("${a}", ["???"])
        self.first = nn.Linear(in_channels * image_size**2, hidden)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), act(), nn.Dropout(drop)) for _ in range(4))
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Plain:
    pass


class Wide(nn.Module):
    def __init__(self, width: int, *sizes, yes={1: 2}, num_classes=10, **more):
        super().__init__()
        self.layer = nn.Linear(64 * width, num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1))
'''


@pytest.fixture
def adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Any]]:
    """Return what runs the program in a project, with its checks forked from here, for its exit code and what it says."""

    def check(line: list[str]) -> str:
        done = typed("mode=check", *line, directory=tmp_path)
        return done.output if done.code else ""

    def run(*words: str) -> tuple[int, str]:
        try:
            code, said = program.main([*words]), ""
        except SystemExit as end:
            code, said = 1, str(end)
        return code, capsys.readouterr().out + said

    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "odd.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(program, "_check", check)
    yield run
    for name in ("nets", "nets.odd"):
        sys.modules.pop(name, None)


def test_the_file_has_every_plain_argument_and_the_strategies_are_told_apart(
    adopted: Callable[..., Any], tmp_path: Path
) -> None:
    code, output = adopted("nets/odd.py:OddNet", "dataset.num_workers=0", "parallel=ddp,context")
    assert code == 0, output
    text = (tmp_path / "conf" / "model" / "odd_net.yaml").read_text()
    assert yaml.safe_load(text) == {
        "_target_": "nets.odd.OddNet", "hidden": 12, "drop": 0.5, "widths": [3, 4], "fill": r"\${a}",
    }  # fmt: skip
    assert text.startswith("# Layers one after the other, in a list.\n")
    assert re.search(r"ddp +yes\n", output)
    assert re.search(r"context +not yet:\n +parallel: OddNet does not have mixers\(\)", output)
    run = typed("model=odd_net", *SMALL, "rehearse=false", "parallel=pipeline", "launch.nproc_per_node=2", directory=tmp_path)
    assert run.code == 0, run.output


def test_what_has_no_default_is_asked_for_and_the_file_stays(adopted: Callable[..., Any], tmp_path: Path) -> None:
    code, output = adopted("nets.odd:Wide", "parallel=ddp")
    assert code == 1 and "before any strategy:" in output and "model.width: " in output
    file = tmp_path / "conf" / "model" / "wide.yaml"
    assert not {"# sizes", "# more"} & {line.partition(":")[0] for line in file.read_text().splitlines()}
    file.write_text(file.read_text() + "# mine\n")
    code, output = adopted("nets.odd:Wide", "parallel=ddp")
    assert code == 1 and "is not changed" in output and file.read_text().endswith("# mine\n"), output


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "needs a model"),
        (["nets.odd:OdNet"], "OdNet"),
        (["nets.odd:Plain"], "nets.odd.Plain is not a class of torch.nn.Module, LightningModule or LightningDataModule"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    words: list[str], answer: str, adopted: Callable[..., Any], tmp_path: Path
) -> None:
    code, output = adopted(*words)
    assert code == 1 and answer in output and len(output.splitlines()) == 1, output
    assert not (tmp_path / "conf").exists()
