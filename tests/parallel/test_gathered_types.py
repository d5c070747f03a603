"""Under autocast, FSDP gathers in 16 bits what autocast casts: half the bytes, the same numbers."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.config.folders import CONF
from framework.engine.forward import Forward
from framework.parallel.gathered_types import Types
from tests.harness import assert_close, assert_same_bits, finished, slow_but, together

RUN = ["precision=bf16", "global_batch_size=14", "micro_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=6",
       "trainer.log_every=1", "trainer.eval_every=3", "dataset=synthetic", "dataset.num_train=66", "dataset.num_val=31",
       "dataset.num_test=32", "checkpoint.every=null", "rehearse=false"]  # fmt: skip
TOKENS = ["dataset.kind=tokens", "task=language_modeling", "dataset.seq_len=13", "dataset.vocab_size=16"]
MODELS = {
    "gpt": [*TOKENS, "model=gpt", "model.dim=32", "model.num_layers=3", "model.num_heads=4"],
    "gpt, tied": [*TOKENS, "model=gpt", "model.dim=32", "model.num_layers=3", "model.num_heads=4", "model.tie_embeddings=true"],
    "transformers' GPT-2": [*TOKENS, "model=gpt2"],
    "cnn": ["dataset.image_size=8", "model=cnn", "model.channels=[8,16,16]", "model.norm=batch"],
}
OTHERS = [("hsdp", 2, ["parallel.param_dtype=fp32"]), ("fsdp+tp", 4, ["parallel.param_dtype=fp32"]),
          ("fsdp+context", 2, ["parallel.param_dtype=fp32"]), ("pp+fsdp+tp", 4, ["parallel.tensor=1"])]  # fmt: skip
# the blocks' layers are not torch's: they multiply by addmm
GPT2 = """_target_: transformers.GPT2LMHeadModel
config:
  _target_: transformers.GPT2Config
  vocab_size: 16
  n_positions: 13
  n_embd: 32
  n_layer: 3
  n_head: 4
  resid_pdrop: 0.0
  embd_pdrop: 0.0
  attn_pdrop: 0.0
  tie_word_embeddings: false
"""


def gathered(file: Path) -> Callable[[], None]:
    """Return what lets rank 0 note the bytes that it gathers from all processes."""

    def count() -> None:
        def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
            def gather(output: Tensor, *given: Any, **more: Any) -> Any:
                if dist.get_rank() == 0:
                    with file.open("a") as lines:
                        lines.write(f"{output.numel() * output.element_size()}\n")
                return plain(output, *given, **more)

            return gather

        for name in {"all_gather_single", "all_gather_into_tensor"} & set(dir(dist)):  # FSDP's, by release of torch
            setattr(dist, name, counted(getattr(dist, name)))

    return count


@pytest.fixture(scope="module")
def with_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], None]:
    conf = tmp_path_factory.mktemp("own") / "conf"
    shutil.copytree(CONF, conf)
    (conf / "model/gpt2.yaml").write_text(GPT2)
    return lambda: os.environ.update(STEADFAST_CONF=str(conf))


@pytest.mark.parametrize("model", slow_but(["gpt"], MODELS))
def test_half_the_bytes_are_gathered_and_no_bit_changes(model: str, with_gpt2: Callable[[], None], tmp_path: Path) -> None:
    line = [*RUN, *MODELS[model], "parallel=fsdp", "launch.nproc_per_node=2"]
    runs, num_bytes = [], []
    for name, more in (("autocast", []), ("fp32", ["parallel.param_dtype=fp32"])):
        runs.append(
            finished(*line, *more, root=tmp_path / name, before=together(with_gpt2, gathered(tmp_path / f"{name}.txt")))
        )
        num_bytes.append(sum(map(int, (tmp_path / f"{name}.txt").read_text().split())))
    assert_same_bits(*runs)
    most = 0.7 if model == "gpt, tied" else 0.56  # the tied weight is also an embedding's, which stays float32
    assert 0.5 <= num_bytes[0] / num_bytes[1] < most, num_bytes
    one = finished(*RUN, *MODELS[model], root=tmp_path / "one", before=with_gpt2)
    assert_close(runs[0], one, tolerance=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "whole"), OTHERS)
def test_every_strategy_that_shards_stays_close_to_one_process(
    strategy: str, ranks: int, whole: list[str], tmp_path: Path
) -> None:
    line = [*RUN, *MODELS["gpt"], f"parallel={strategy}", f"launch.nproc_per_node={ranks}"]
    run = finished(*line, root=tmp_path / "autocast")
    assert_close(run, finished(*RUN, *MODELS["gpt"], root=tmp_path / "one"), tolerance=2e-2)
    if "parallel.param_dtype=fp32" in whole:
        assert_same_bits(run, finished(*line, *whole, root=tmp_path / "fp32"))


class Mixed(nn.Module):
    """Layers of each kind: multiplied by, normalised by, looked up, used outside of its call, and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.linear, self.regularised = nn.Linear(4, 4), nn.Linear(4, 4)
        self.raw = nn.Parameter(torch.ones(4, 4))
        self.reads_numbers = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.linear(self.norm(self.embedding(tokens))) @ self.raw
        if self.reads_numbers and x.sum().item() > 0:
            x = x + 1
        return self.regularised(x) * self.regularised.weight.norm()


class Task:
    def loss(self, outputs: Any, targets: Any) -> Any: ...


class OwnStep(Task):
    def step(self, *_: Any) -> Any: ...


def types_of(
    model: nn.Module, *, param_dtype: str | None = None, task: Task | None = None, without_example: bool = False
) -> Types:
    cpu, example = torch.device("cpu"), None if without_example else torch.zeros(2, 3, dtype=torch.int64)
    forward = Forward(task or Task(), seed=0, devices=[cpu], autocast=torch.bfloat16, example=example)  # type: ignore[arg-type]
    return Types.of(model, forward=forward, param_dtype=param_dtype)


def test_what_autocast_multiplies_by_is_cast_and_nothing_else() -> None:
    model = Mixed()
    types = types_of(model)
    assert types.cast == {(model, "raw"), (model.linear, "weight"), (model.linear, "bias"), (model.regularised, "bias")}
    # a layer whose weight is read from outside of its call would not be gathered there, had it a unit of its own
    assert model.norm in types.apart and model.regularised not in types.apart
    ((unit, policy),) = types.policies(model, model)
    assert unit is model and policy.param_dtype is None


def test_layers_that_autocast_keeps_are_units_of_their_own_in_float32() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    found = list(types_of(model).policies(model, model))
    assert [(unit, policy.param_dtype) for unit, policy in found] == [
        (model[0], None),
        (model[1], None),
        (model, torch.bfloat16),
    ]
    assert found[-1][1].reduce_dtype is torch.float32 and not found[-1][1].cast_forward_inputs


def test_without_a_whole_trace_or_with_fp32_parameters_are_gathered_as_they_are() -> None:
    model = Mixed()
    model.reads_numbers = True
    asked, cannot = types_of(Mixed(), param_dtype="fp32"), "in float32, since "
    unseen = types_of(Mixed(), without_example=True)
    for types, note in (
        (types_of(model), "cannot be followed"),
        (types_of(Mixed(), task=OwnStep()), "its own step"),
        (unseen, "the data"),
    ):
        assert types.autocast is None and types.compute is None and types.note.startswith(cannot) and note in types.note
    assert asked.autocast is None and asked.compute is None and not asked.note
    assert not types_of(Mixed()).note


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight


class Read(nn.Module):
    """A weight that is multiplied by, and read in another way too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding, self.weight, self.how = nn.Embedding(7, 4), nn.Parameter(torch.ones(4, 4)), how

    def forward(self, tokens: Tensor) -> Any:
        x: Tensor = self.embedding(tokens)
        if self.how == "function":
            return Product.apply(x, self.weight)
        if self.how == "autocast is off":
            with torch.autocast("cpu", enabled=False):
                return x @ self.weight
        if self.how in ("half", "no cache"):
            how: dict[str, Any] = {"dtype": torch.float16} if self.how == "half" else {"cache_enabled": False}
            with torch.autocast("cpu", **{"dtype": torch.bfloat16, **how}):
                return x @ self.weight
        y = x @ self.weight
        if self.how == "backward" and y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.weight.norm())
        if self.how == "penalty" and self.training:
            return y, self.weight.square().sum()
        if self.how == "returned":
            return {"y": y, "weight": self.weight}
        return y.to(self.weight.dtype) if self.how == "type" else y


@pytest.mark.parametrize("how", ["penalty", "autocast is off", "function", "returned", "type", "half", "no cache", "backward"])
def test_a_weight_that_is_also_read_otherwise_stays_in_float32(how: str) -> None:
    assert not types_of(Read(how)).cast
    assert types_of(Read("only multiplied by")).cast  # the check can fail
