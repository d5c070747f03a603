"""The identity: which configurations are one run, and which are two."""

from typing import Annotated, Any

import pytest
from annotated_types import Ge

from framework.config.compose import compose_line
from framework.config.folders import ROOT, options
from framework.config.identity import INEXACT, identity
from framework.config.schema import RunConfig
from framework.parallel.layout import Options
from framework.parallel.parallelize import exact_options
from tests.test_conformance import NOT_EQUAL

Share = Annotated[float, Ge(0)]


class Own:
    """A component of a user, whose names are those of keys that say how the framework's own components are executed."""

    def __init__(self, *, source: str = "", sequence: str = "", keep: int | float = 1.0, any: Any = None, rate: float = 1.0,
                 rates: list[float] | None = None, alias: Share = 1.0, count: int = 1, act: Any = None) -> None: ...  # fmt: skip


class Stack:
    """A component that builds what it gets, in the order of its arguments."""

    def __init__(self, rate: float = 1.0, **layers: Any) -> None: ...


OWN, STACK = {"_target_": "tests.test_identity.Own"}, {"_target_": "tests.test_identity.Stack"}
STOPS = "trainer.early_stopping.patience=3"
EXACT, TOKENS = "framework.parallel.parallelize.parallelize", "framework.data.tokens.Tokens"


def node(**values: Any) -> dict[str, Any]:
    return {"model": OWN | values}


@pytest.mark.parametrize(("one", "other"), [
    (node(keep=1), node(keep=1.0)),
    (node(any=1), node(any=1.0)),
    (node(count=1), node(count=1.0)),
    (node(any=1), node(any=True)),
    (node(any=[1, 2]), node(any=[1.0, 2.0])),
    (node(any={"deep": [{"keep": 1}]}), node(any={"deep": [{"keep": 1.0}]})),
    (node(rate=1.5), node(rate=1)),
    (node(other=1), node(other=1.0)),
    (node(act={}), node()),
    (node(act={}), node(act=None)),
    (node(act=None), node()),
    (node(act=[]), node(act={})),
    (node(act={"slope": {}}), node(act={})),
    (node(act={0: "a"}), node(act={"0": "a"})),
    (node(act={"a.b": 1}), node(act={"a": {"b": 1}})),
    ({"dataset": OWN | {"source": "north"}}, {"dataset": OWN | {"source": "south"}}),
    ({"parallel": OWN | {"sequence": None}}, {"parallel": OWN | {"sequence": False}}),
    ({"parallel": OWN | {"prefetch": 1}}, {"parallel": OWN | {"prefetch": 2}}),
    ({"parallel": OWN}, {"parallel": {"_target_": EXACT}}),
    ({"parallel": {"_target_": EXACT, "param_dtype": "bf16"}}, {"parallel": {"_target_": EXACT, "param_dtype": None}}),
    ({"dataset": {"_target_": "framework.data.map_style.MapStyle", "train": OWN | {"source": "north", "num_workers": 1}}},
     {"dataset": {"_target_": "framework.data.map_style.MapStyle", "train": OWN | {"source": "north", "num_workers": 2}}}),
    ({"extra": {"x": 1}}, {"extra": {"x": 1.0}}),
    (node(act={0: "a", "x": "b"}), node(act={"x": "b", 0: "a"})),
    (node(act=[{"a": OWN, "b": OWN}]), node(act=[{"b": OWN, "a": OWN}])),
    ({"part": {"a": OWN, "b": OWN}}, {"part": {"b": OWN, "a": OWN}}),
    ({"optimizer": OWN | {"turns": {"a": {}, "b": {}}}}, {"optimizer": OWN | {"turns": {"b": {}, "a": {}}}}),
    ({"model": STACK | {"a": 1, "b": 2}}, {"model": STACK | {"b": 2, "a": 1}}),
    (node(act=STACK | {"a": 1, "b": 2}), node(act=STACK | {"b": 2, "a": 1})),
    (node(_convert_="none"), node()),
    (node(_convert_="none", act=OWN | {"_convert_": "all"}), node(_convert_="none", act=OWN)),
])  # fmt: skip
def test_two_configurations_are_two_runs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identity(one) != identity(other)


@pytest.mark.parametrize(("one", "other"), [
    (node(rate=1), node(rate=1.0)),
    (node(alias=1), node(alias=1.0)),
    (node(rates=[1, 2.5]), node(rates=[1.0, 2.5])),
    (node(act=OWN | {"rate": 1}), node(act=OWN | {"rate": 1.0})),
    (node(act=OWN | {"rate": 2, "count": 3}), node(act={"count": 3, "rate": 2} | OWN)),
    (node(init_from={"path": "a", "strict": False}), node(init_from={"strict": False, "path": "a"})),
    ({"optimizer": OWN | {"turns": {"a": {"match": "x", "every": 2}}}}, {"optimizer": OWN | {"turns": {"a": {"every": 2, "match": "x"}}}}),
    ({"metric": {"a": OWN, "b": OWN}}, {"metric": {"b": OWN, "a": OWN}}),
    ({"optimizer": OWN | {"groups": [{"match": "x", "weight_decay": 0}]}}, {"optimizer": OWN | {"groups": [{"match": "x", "weight_decay": 0.0}]}}),
    (node(parts={"blocks": "layers"}), node()),
    ({"dataset": OWN | {"num_workers": 1}}, {"dataset": OWN | {"num_workers": 2}}),
    ({"dataset": {"_target_": TOKENS, "source": "a"}}, {"dataset": {"_target_": TOKENS, "source": "b"}}),
    ({"parallel": {"_target_": EXACT, "prefetch": 1}}, {"parallel": {"_target_": EXACT, "prefetch": None}}),
    ({"parallel": {"_target_": EXACT, "param_dtype": None}}, {}),
    ({"metric": {}}, {}),
    (node(_convert_="all", act=OWN | {"_convert_": "partial"}), node(act=OWN)),
    (node(init_from=None, parts=None), node()),
    (RunConfig.model_construct().model_dump(), {}),
    ({"trainer": {"max_epochs": 1, "clip_grad_norm": None}}, {"trainer": {"max_epochs": 1}}),
    ({"model": STACK | {"a": 1, "rate": 2, "parts": {"blocks": "x"}}}, {"model": {"parts": {"blocks": "y"}, "rate": 2.0} | STACK | {"a": 1}}),
])  # fmt: skip
def test_two_configurations_are_one_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identity(one) == identity(other)


@pytest.mark.parametrize(("one", "other", "is_one_run"), [
    (["trainer.clip_grad_norm=1"], ["trainer.clip_grad_norm=1.0"], True),
    (["optimizer.lr=1", "optimizer.betas=[0,1e-1]"], ["optimizer.lr=1.0", "optimizer.betas=[0.0,0.1]"], True),
    (["checkpoint.monitor=val/accuracy"], ["checkpoint.monitor=val/accuracy", "checkpoint.mode=min"], False),
    ([STOPS, "trainer.early_stopping.monitor=val/accuracy"],
     [STOPS, "trainer.early_stopping.monitor=val/accuracy", "trainer.early_stopping.mode=min"], False),
    (["+x=1"], ["+x=1.0"], False),
    (["parallel=fsdp"], ["parallel=fsdp", "parallel.reduce_dtype=bf16"], False),
    (["parallel=local-sgd"], [], False),
    (["parallel=local-sgd"], ["parallel=diloco"], False),
    (["invariance=bitwise", "micro_batch_size=8", "parallel=ddp"], ["micro_batch_size=8", "parallel=ddp"], False),
    (["backend=gloo", "launch.nproc_per_node=4", "logger=[tensorboard,wandb]", "run.root=elsewhere", "run.dir=there", "run.resume=never",
      "trainer.profile=all", "trainer.log_every=5"], [], True),
    (["trainer.log_every=5", STOPS, "trainer.early_stopping.monitor=val/loss"], [STOPS, "trainer.early_stopping.monitor=val/loss"], True),
    (["trainer.log_every=5", STOPS, "trainer.early_stopping.monitor=train/loss"], [STOPS, "trainer.early_stopping.monitor=train/loss"], False),
    (["trainer.log_every=5", "part=gradient_norms"], ["part=gradient_norms"], False),  # a part knows which steps have rows
    (["trainer.activation_checkpointing=true", "trainer.activation_offload=true"], [], True),
    (["trainer.early_stopping.monitor=val/accuracy"], [], True),  # without patience
])  # fmt: skip
def test_two_commands(one: list[str], other: list[str], is_one_run: bool) -> None:
    ids = {compose_line(line).config["run"]["id"] for line in (one, other)}
    assert len(ids) == (1 if is_one_run else 2)


@pytest.mark.parametrize("strategy", options("parallel"))
def test_a_strategy_is_part_of_a_run_only_if_it_computes_something_else(strategy: str) -> None:
    ids = {compose_line(line).config["run"]["id"] for line in ([f"parallel={strategy}"], [])}
    assert len(ids) == (2 if strategy in (*NOT_EQUAL, "parameter-server") else 1)


def test_the_options_that_round_are_those_that_the_rehearsal_turns_off() -> None:
    given = dict.fromkeys(Options.__annotations__, 1)
    assert {name for name, value in exact_options(**given).items() if value is None} == {*INEXACT}


def test_the_id_of_the_default_run_is_the_one_that_the_readme_shows() -> None:
    assert f" runs/default/{compose_line([]).config['run']['id']}\n" in (ROOT / "README.md").read_text()
