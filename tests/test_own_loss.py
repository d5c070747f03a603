"""Models of other people that compute their own loss train as in a plain loop, and the same on any number of processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.data.order import Order
from framework.tasks.own_loss import OwnLoss
from tests import zoo
from tests.harness import assert_close, assert_same_bits, command, exact_rows, finished, once, refused
from tests.zoo import hf


def samples() -> list[dict[str, Tensor]]:
    """Sequences with padding of different lengths, whose labels are -100 there."""
    draws = torch.Generator().manual_seed(0)
    found = []
    for length in torch.randint(4, 13, (40,), generator=draws).tolist():
        tokens = torch.randint(1, 17, (12,), generator=draws)
        counts = torch.arange(12) < length
        found.append({"input_ids": tokens, "attention_mask": counts.long(), "labels": tokens.where(counts, -100)})
    return found


NO_DROPOUT = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
gpt2 = hf("GPT2", "LMHeadModel", **zoo.GPT2 | NO_DROPOUT | {"vocab_size": 17, "bos_token_id": 0, "eos_token_id": 0})
bert = hf("Bert", "ForMaskedLM", **zoo.LM | {"vocab_size": 17}, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip


class Detector(nn.Module):
    """It returns its losses in training mode, and predictions else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.boxes, self.scores = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor, targets: dict[str, Tensor] | None = None) -> Any:
        features = self.body(x).tanh()
        if not self.training:
            return {"boxes": self.boxes(features), "scores": self.scores(features)}
        assert targets is not None
        return {"loss_box": F.l1_loss(self.boxes(features), targets["boxes"]),
                "loss_class": F.cross_entropy(self.scores(features), targets["labels"])}  # fmt: skip


class Autoencoder(nn.Module):
    """It needs no targets, as a masked autoencoder does not."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.up(self.down(x).tanh()), x)}


def points() -> list[Any]:
    draws = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=draws), "name": "a point"} for _ in range(40)]


def scenes() -> list[Any]:
    draws = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, generator=draws), {"boxes": torch.rand(4, generator=draws), "labels": number % 3})
        for number in range(40)
    ]


@dataclass
class Sequences:
    """A batch with names, as a collate function may return it."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


def in_sequences(samples: list[Any]) -> Sequences:
    return Sequences(**torch.utils.data.default_collate(samples))


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what the commands' processes then have."""
    gpt2(), bert()


RUN = ["dataset=map_style", "task=own_loss", "precision=fp64", "global_batch_size=8", "trainer.max_steps=6", "trainer.max_epochs=null",
       "trainer.log_every=1", "trainer.eval_every=3", "seed=5"]  # fmt: skip
TOKENS = [
    *RUN,
    f"dataset.train._target_={__name__}.samples",
    "dataset.inputs=[input_ids,attention_mask]",
    "dataset.targets=labels",
]
CASES = {
    "gpt2": [*TOKENS, f"model._target_={__name__}.gpt2", "task.weight=shifted_tokens"],
    "bert": [*TOKENS, f"model._target_={__name__}.bert", "task.weight=tokens"],
    "detector": [*RUN, f"dataset.train._target_={__name__}.scenes", f"model._target_={__name__}.Detector",
                 "task.evaluates_in_training_mode=true"],
    "no targets": [*RUN, f"dataset.train._target_={__name__}.points", f"model._target_={__name__}.Autoencoder", "dataset.inputs=[x]"],
}  # fmt: skip
PRECISE = {"gpt2": 1e-6, "bert": 1e-10}  # its library computes the loss of a causal model in float32


def batches(seed: int) -> Iterator[list[Any]]:
    """The run's training samples: those that are left when a tenth is held out for validation, and one for the test."""
    from framework.data.map_style import MapStyle

    source = MapStyle(train=samples, inputs=["input_ids", "attention_mask"], targets="labels").load("train")
    order, seen = Order(num_samples=len(source), global_batch_size=8, seed=seed, drop_last=False), 0
    while True:
        numbers = order.batch(seen)[1]
        seen += len(numbers)
        yield [source.sample(int(number)) for number in numbers]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_it_computes_what_a_plain_loop_does(name: str) -> None:
    torch.manual_seed(5)
    model = {"gpt2": gpt2, "bert": bert}[name]().double()
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, batch in zip(range(6), batches(5)):
        loss = model(**torch.utils.data.default_collate(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    line = [*CASES[name], "optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.nesterov=false",
            "scheduler=constant", "micro_batch_size=3"]  # fmt: skip
    rows = [row["loss"] for row in exact_rows(once(*line)) if row["split"] == "train"]
    assert rows == pytest.approx(losses, rel=PRECISE[name])


@pytest.mark.slow
def test_a_batch_that_is_a_dataclass_is_what_a_dictionary_of_its_fields_is() -> None:
    in_one = f"dataset.collate={{_target_: {__name__}.in_sequences, _partial_: true}}"
    assert_same_bits(once(*CASES["bert"], in_one), once(*CASES["bert"]))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["no targets", "gpt2", "detector", "bert"])
def test_two_processes_compute_what_one_does(name: str, tmp_path: Path) -> None:
    two = finished(*CASES[name], "parallel=ddp", "launch.nproc_per_node=2", "rehearse=true", root=tmp_path / "runs")
    assert_close(two, once(*CASES[name]), tolerance=PRECISE.get(name, 1e-10))
    assert "loss of a batch" not in two.output


def test_inputs_in_a_list_or_a_tuple_are_the_arguments_of_the_model() -> None:
    for inputs in ([1, 2], (1, 2)):
        assert OwnLoss(weight="samples", labels="labels", evaluates_in_training_mode=False)._call(
            lambda *given: given, inputs, 3
        ) == (1, 2, 3)


def test_a_model_that_returns_no_number_is_refused_with_the_shape_of_what_it_returns() -> None:
    task, context = (
        OwnLoss(weight="samples", labels="labels", evaluates_in_training_mode=False),
        SimpleNamespace(is_training=True),
    )
    with pytest.raises(TypeError, match=r"the model returns a tensor of shape \[4\], and no loss, in training"):
        task.step(lambda inputs: inputs, SimpleNamespace(inputs=torch.ones(4), targets=None), context)


@pytest.mark.slow
def test_another_mean_than_the_declared_one_is_named(tmp_path: Path) -> None:
    line = [*CASES["gpt2"], "task.weight=samples", "parallel=ddp", "launch.nproc_per_node=2", "rehearse=true"]
    assert "its loss of a batch" in command(*line, root=tmp_path / "runs").output


def test_a_model_without_a_loss_in_an_evaluation_is_refused_with_the_remedy() -> None:
    said = refused(*CASES["detector"], "task.evaluates_in_training_mode=false", "rehearse=true")
    assert "task.evaluates_in_training_mode=true" in said
