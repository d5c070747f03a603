"""The configuration: what a run's identity depends on, what is frozen, what is printed, and sweeps."""

import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from framework.config.compose import Composed, compose_line
from framework.config.folders import groups, option_node, options
from framework.config.frozen_file import freeze, thaw
from framework.config.help import help_text
from framework.config.identity import flat
from framework.config.schema import COMPONENTS, OWN
from framework.config.targets import locate
from framework.config.validation import component_problems, validate
from framework.sweep.line import read
from framework.sweep.space import combinations
from tests.harness import Says, checked, typed

REPOSITORY = Path(__file__).resolve().parent.parent


@cache  # a composition takes Hydra a tenth of a second
def composed(*overrides: str) -> Composed:
    return compose_line(list(overrides))


def run_id(*overrides: str) -> str:
    found = composed(*overrides)
    assert not found.problems
    return found.config["run"]["id"]


def test_an_import_that_fails_late_names_its_cause_and_not_the_name_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"no module with {name}") from RuntimeError("an operator does not exist")

    package: Any = ModuleType("late")
    package.__getattr__, package.__dir__ = missing, lambda: ["Net"]
    monkeypatch.setitem(sys.modules, "late", package)
    with pytest.raises(ValueError, match=r"\(ModuleNotFoundError: no module with Net: an operator does not exist\)$"):
        locate("late.Net")


@pytest.mark.parametrize(("one", "other"), [
    (["seed=1", "model=mlp", "model.dim=32"], ["model.dim=32", "model=mlp", "seed=1"]),
    (["optimizer.lr=1"], ["optimizer.lr=1.0"]),
    (["optimizer.lr=1e-3"], ["optimizer.lr=0.001"]),
    (["seed=0", "model=cnn", "optimizer=adamw", "trainer.max_epochs=40", "optimizer.lr=2e-3"], []),
    (["+seed=3", "++model=mlp"], ["seed=3", "model=mlp"]),
    (["seed=3"], ["seed=2", "seed=3"]),
    (["trainer={max_steps:3}"], ["trainer.max_steps=3"]),
    (["experiment=null"], []),
])  # fmt: skip
def test_commands_that_mean_the_same_are_the_same_run(one: list[str], other: list[str]) -> None:
    assert composed(*one)[:2] == composed(*other)[:2]
    assert run_id(*one) == run_id(*other)


@pytest.mark.parametrize("key", ["name", "run.mirror", "+tag", "model.width"])
def test_what_names_a_run_does_not_change_with_the_time_or_by_chance(key: str) -> None:
    draw = iter(range(9)).__next__
    OmegaConf.register_new_resolver("next", draw, use_cache=True, replace=True)
    for value in ("${now:%H%M%S}", "${now:%Y}", "${next:}", "'${oc.select:missing,${next:}}'"):
        problems = compose_line([f"{key}={value}"]).problems
        assert [(problem.key, "would not find its run again" in problem.what) for problem in problems] == [
            (key.replace("+", "extra."), True)
        ]


@pytest.mark.parametrize("override", [
    "run.group=${now:%f}", "logger.mine.name=${now:%f}", "name=${oc.env:HOME}", "+tag=${now:fixed}", "name=${run_id:}",
])  # fmt: skip
def test_a_value_that_stays_or_does_not_name_the_run_may_be_resolved(override: str) -> None:
    assert compose_line([override]).problems == []


def composed_model(*line: str) -> dict[str, Any]:
    composed = compose_line([*line])
    assert composed.problems == []
    return composed.config["model"]


@pytest.mark.parametrize(("line", "model"), [
    (["model={_target_: a.A, width: 1}", "model._target_=a.B"], {"_target_": "a.B", "width": 1}),
    (["model._target_=a.B", "model={_target_: a.A, width: 1}"], {"_target_": "a.A", "width": 1}),
    (["model._target_=a.A", "model={_target_: a.B}", "model._target_=a.C"], {"_target_": "a.C"}),
    (["model.width=1", "model._target_=a.A"], {"_target_": "a.A", "width": 1}),
    (["model.width=1", "model={_target_: a.A}"], {"_target_": "a.A", "width": 1}),
    (["model._target_=a.A", "model.width=1", "model.width=2"], {"_target_": "a.A", "width": 2}),
    (["model._target_=a.A", "~model._target_", "model={_target_: a.B}"], {"_target_": "a.B"}),
    (["model._target_=a.A", "model.act={_target_: a.B, x: 1}", "model.act._target_=a.C"],
     {"_target_": "a.A", "act": {"_target_": "a.C", "x": 1}}),
    (["model.act.x=1", "model={_target_: a.A, act: {_target_: a.B}}"], {"_target_": "a.A", "act": {"_target_": "a.B", "x": 1}}),
])  # fmt: skip
def test_overrides_are_applied_in_their_order(line: list[str], model: dict[str, Any]) -> None:
    assert composed_model(*line) == model


def test_a_target_that_comes_back_keeps_the_keys_of_its_file() -> None:
    assert composed_model("model._target_=a.A", "model._target_=models.cnn.CNN") == composed_model()


def test_a_null_becomes_a_component_in_any_order() -> None:
    hook = ["parallel.hook.factor=1", "parallel.hook._target_=a.B"]
    for line in (hook, hook[::-1]):
        composed = compose_line(["parallel=ddp", *line])
        assert composed.problems == [] and composed.config["parallel"]["hook"] == {"_target_": "a.B", "factor": 1}


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options named like numbers and words of YAML, and a group in the group `model`."""
    files = {
        "big": "defaults: [{encoder: small}, _self_]\n_target_: a.Net\n",
        "encoder/small": "width: 3\n",
        "encoder/large": "width: 9\n",
    }
    files |= {name: f"_target_: a.Net\nwidth: '{name}'\n" for name in ("50", "1e3", "true", "null", "a b")}
    for name, text in files.items():
        path = tmp_path / "conf" / "model" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)


BIG, NET = ["model=big", "model/encoder=large"], {"_target_": "a.Net"}


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(("line", "model"), [
    (["model=big"], NET | {"encoder": {"width": 3}}),
    (BIG, NET | {"encoder": {"width": 9}}),
    (["model=big", "model/encoder@model.encoder=large"], NET | {"encoder": {"width": 9}}),
    (["model=big", "+model/encoder@model.other=large"], NET | {"encoder": {"width": 3}, "other": {"width": 9}}),
    ([*BIG, "model.encoder.width=4"], NET | {"encoder": {"width": 4}}),
    (["model=big", "~model/encoder"], NET),
    (["model=1e3"], NET | {"width": "1e3"}),
    (["model='null'"], NET | {"width": "null"}),
])  # fmt: skip
def test_groups_in_groups_and_options_named_like_numbers(line: list[str], model: dict[str, Any]) -> None:
    assert composed_model(*line) == model


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(("line", "words"), [
    (BIG[1:], "model/encoder=large: defaults"),
    (["model=big", "model/encoder=lrge"], "model/encoder: did you mean large"),
    (["model=big", "model/encoder=null"], "model/encoder: did you mean ~model/encoder"),
    (["model=big", "model.encoder=large"], "model.encoder: did you mean model/encoder=large"),
    (["model=null"], "model: did you mean \"model='null'\""),
    (["model=1000.0"], "model: did you mean \"model='1e3'\""),
])  # fmt: skip
def test_a_choice_that_is_not_possible_has_its_remedy(line: list[str], words: str) -> None:
    (problem,) = compose_line(line).problems
    assert str(problem) == Says(words)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(("swept", "models"), [
    (["model=big", "model/encoder=small,large"], [NET | {"encoder": {"width": 3}}, NET | {"encoder": {"width": 9}}]),
    (["model=big", "+model/encoder@model.encoder.deep=small,large"],
     [NET | {"encoder": {"width": 3, "deep": {"width": width}}} for width in (3, 9)]),
    (["model=50,'1e3'"], [NET | {"width": "50"}, NET | {"width": "1e3"}]),
])  # fmt: skip
def test_groups_in_groups_and_options_named_like_numbers_can_be_swept(swept: list[str], models: list[dict[str, Any]]) -> None:
    multirun, problems = read(swept)
    assert problems == []
    assert [composed_model(*multirun.line(values)) for values in combinations(multirun.space)] == models


@pytest.mark.parametrize("are_alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_option_fits_the_schema(are_alone: bool) -> None:
    chosen = {name: options(name) for name in groups() if options(name)}
    chosen["task"].remove("lightning")  # which brings its model, optimizer and schedule
    alone = [[("task", "lightning")], *([("experiment", option)] for option in chosen.pop("experiment"))]
    together = [[(name, one[n % len(one)]) for name, one in chosen.items()] for n in range(max(map(len, chosen.values())))]
    for line in alone if are_alone else together:
        found = compose_line([f"{group}={option}" for group, option in line])
        config, problems = found.config, validate(found).problems
        for name in COMPONENTS:
            problems += component_problems(name, config[name], known=found.known, own=OWN.get(name, ())) if config[name] else []
        asked = [problem.key for problem in problems if problem.what == "??? is not valid"]  # which the user must give
        assert sorted(asked) == sorted(f"{group}.{key}" for group, option in line for key, value in flat(option_node(group, option)).items()
                                       if value == "???"), line  # fmt: skip
        assert [problem for problem in problems if problem.key not in asked] == [], line


OPTIONS = [
    (group, name) for group in ("model", "dataset") for name in options(group) if "???" not in option_node(group, name).values()
]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_has_every_argument_of_its_constructor_with_its_default(group: str, option: str) -> None:
    node = option_node(group, option)
    parameters = inspect.signature(locate(node.pop("_target_"))).parameters
    node.pop("defaults", None)
    assert node.keys() == parameters.keys()
    assert group != "dataset" or "num_workers" in node
    for key, parameter in parameters.items():
        assert parameter.kind is parameter.KEYWORD_ONLY
        if parameter.default is not parameter.empty:
            assert node[key] == parameter.default
        elif key in ("num_classes", "in_channels", "image_size", "vocab_size", "seq_len"):
            assert node[key] is None, "from the data"


def test_a_frozen_configuration_comes_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    config = checked("optimizer.lr=3", "model.channels=[4,8]", "+names={0: a, x: b, true: c}")
    frozen = freeze(config.plain(), tmp_path)
    assert thaw(frozen) == config
    frozen.path.write_text(frozen.path.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(ValueError, match="has changed since this run was started"):
        thaw(frozen)


def test_cfg_prints_the_composition(tmp_path: Path) -> None:
    overrides = ["model=mlp", "seed=3", "name=x", "logger=[tensorboard,wandb]", "optimizer.lr=1e-3"]
    printed = typed("--cfg", "job", "--resolve", *overrides, directory=tmp_path)
    assert printed.code == 0 and yaml.safe_load(printed.output) == compose_line(overrides).config
    assert [path.name for path in tmp_path.iterdir()] == ["runs.output"], "the harness's file alone"


def test_help_names_every_group_option_and_key(tmp_path: Path) -> None:
    printed = typed("--help", "lr=1", directory=tmp_path)  # whatever else is wrong, help is help
    assert printed.code == 0 and [path.name for path in tmp_path.iterdir()] == ["runs.output"], "the harness's file alone"
    for group in groups():
        assert not options(group) or f"\n  {group}\n" in printed.output
        for option in options(group):
            assert f"    {option} " in printed.output or f"  * {option} " in printed.output
    for key in ("seed=0", "trainer.max_steps=null", "trainer.early_stopping.patience=null", "run.root=runs"):
        assert f"\n  {key} " in printed.output
    assert max(map(len, printed.output.splitlines())) <= 120


def test_every_option_and_key_says_what_it_is() -> None:
    listing = help_text([], width=10_000).partition("\nGroups")[2].splitlines()
    bare = [line for line in listing if line.startswith("  ") and len(line.split()) < 3 and line.split()[0] not in groups()]
    assert not bare
