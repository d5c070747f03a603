"""The texts by which runs are compared: whole, different for different values, and cut only where they are printed."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.cli.about_runs import told_apart
from framework.config.frozen_file import freeze
from framework.runs.compare import config_differences
from framework.runs.settings import differences, differing, settings_of, text_of, with_options
from tests.harness import typed

GROUPS = "[{{match: 'layers.*.weight', weight_decay: 0.1}}, {{match: '*.bias', weight_decay: {0}}}]"
LONG = [
    ({"optimizer": {"groups": yaml.safe_load(GROUPS.format(decay))}} for decay in (0.0, 0.9)),
    ({"model": {"widths": [8] * 23 + [last]}} for last in (8, 512)),
    ({"model": {"stages": [[2, first], [4, 8]]}} for first in (1, 9)),
    ({"model": {"note": "word " * 40 + last}} for last in "ab"),
]


def test_different_values_have_different_texts() -> None:
    values: list[Any] = [None, "null", "", "''", True, "true", 1, 1.0, "1", {}, "{}", 0.5, "0.5", "nan", float("nan"), [1, 2], "[1, 2]", [1.5, 2],
                         ["a, b"], ["a", "b"], [["a"], "b"], [{"a": 1}], [{"a": "1"}], [None], ["null"], [8] * 30, [8] * 31]  # fmt: skip
    texts = [settings_of({"key": value})["key"] for value in values]
    assert [(one, other) for one, other in combinations(range(len(values)), 2) if texts[one] == texts[other]] == []
    assert settings_of({"a": {"lr": 1.0, "kind": "plain words"}}) == {"a.lr": "1.0", "a.kind": "plain words"}
    assert text_of(["a"] * 30) != text_of(["a"] * 29 + ["b"])


def test_components_of_the_same_name_are_told_apart() -> None:
    targets = ["neta.Net", "netb.Net", "netb.Other"]
    configs = with_options([settings_of({"model": {"_target_": target, "width": 1}}) for target in targets])
    assert [config["model"] for config in configs] == ["neta.Net", "netb.Net", "Other"]
    assert differing(configs) == ["model"]


def test_a_list_of_lists_that_name_each_other_many_times_does_no_harm() -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    assert len(settings_of(yaml.safe_load("l0: &l0 [1, 2]\n" + levels))["l1"]) < 200


@pytest.mark.parametrize(
    "texts", [["a", "b"], ["x" * 100 + "a" * 50, "x" * 100 + "b" * 50], ["", "x" * 100], ["x" * 50, "x" * 100]]
)
def test_cut_texts_do_not_look_alike(texts: list[str]) -> None:
    assert len(set(told_apart(texts))) == 2 and max(map(len, told_apart(texts))) < 70


@pytest.mark.parametrize("configs", [tuple(pair) for pair in LONG])
def test_the_end_of_a_long_value_is_a_difference(configs: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    paths = [tmp_path / "runs" / name for name in ("aaaa", "bbbb")]
    for path, config in zip(paths, configs):
        path.mkdir(parents=True)
        freeze(config, path)
        (path / "lock").touch()
    ((key, pair),) = config_differences(*paths)[0].items()
    shown = differences(paths)
    assert pair[0] != pair[1] and shown[paths[0]].startswith(f"{key}=") and shown[paths[0]] != shown[paths[1]]
    root = f"run.root={tmp_path / 'runs'}"
    said = typed("diff", "aaaa", "bbbb", root, directory=tmp_path).output
    (line,) = [line for line in said.splitlines() if line.strip().startswith(key)]
    first, second = line.split(key)[1].split("  |  ")
    assert first.strip() != second.strip() and len(line) < 180
    assert pair[1] in typed("show", "bbbb", root, directory=tmp_path).output


def test_a_text_with_spaces_is_one_word_of_the_table(tmp_path: Path) -> None:
    for name, note in (("a", "two words"), ("b", "[1, 2]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"extra": {"note": note}}))
    assert differences([tmp_path / "a"]) == {tmp_path / "a": ""}
    assert [*differences([tmp_path / "a", tmp_path / "b"]).values()] == ["extra.note='two words'", "extra.note='[1, 2]'"]
