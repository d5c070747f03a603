"""A mean over samples needs a row for each; an error in a micro-batch names its samples."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.engine.forward import Forward
from framework.engine.of_samples import WrongRows, require_rows
from framework.engine.seam import MicroBatch
from framework.runtime.exits import headline
from framework.tasks.classification import Classification

ONE, WEIGHTED = {"loss": torch.ones(())}, {"loss": torch.ones(()), "weight of loss": torch.ones(())}


def batch(inputs: Any, targets: Any, *, count: int = 4) -> MicroBatch:
    return MicroBatch(0, inputs, targets, count, 0, samples=[31, 7, 2, 19][:count], split="train")


@pytest.mark.parametrize(
    "targets",
    [torch.zeros(4), torch.zeros(4, 3), torch.zeros(7, 4), [{"boxes": torch.zeros(2, 4)}] * 4, {"a": torch.zeros(4, 9)}],
    ids=["labels", "vectors", "time first", "a list", "names"],
)
def test_targets_with_a_row_for_each_sample_are_averaged(targets: Any) -> None:
    require_rows(ONE, batch(torch.zeros(9, 2), targets))
    with pytest.raises(WrongRows):  # the same inputs, with targets of no sample
        require_rows(ONE, batch(torch.zeros(9, 2), ()))


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [(torch.zeros(3, 2), torch.zeros(3)), (torch.zeros(8, 2), torch.zeros(8)), (torch.zeros(3, 2), ())],
    ids=["fewer", "more", "no targets"],
)
def test_rows_that_are_not_the_samples_are_refused_unless_the_task_has_weights(inputs: Any, targets: Any) -> None:
    with pytest.raises(WrongRows, match=f"dataset: a micro-batch of 4 samples has {len(inputs)} rows, but its loss is"):
        require_rows(ONE, batch(inputs, targets))
    require_rows(WEIGHTED, batch(inputs, targets))


def said(module: nn.Module, micro_batch: MicroBatch) -> str:
    forward = Forward(Classification(label_smoothing=0.0), seed=0, devices=[torch.device("cpu")], autocast=None)
    with pytest.raises(IndexError) as caught:
        forward(module, micro_batch, measure=False)
    return headline(caught.value)


class Table(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.eye(4)[x]


def test_a_label_that_is_no_class_names_its_sample() -> None:
    labels = torch.tensor([0, 3, 7, 1])
    assert said(nn.Identity(), batch(torch.zeros(4, 4), labels)) == "IndexError: Target 7 is out of bounds. (sample 2 of train)"


def test_an_error_of_the_model_names_the_samples_of_its_micro_batch() -> None:
    text = said(Table(), batch(torch.tensor([0, 3, 9, 1]), torch.zeros(4, dtype=torch.long)))
    assert text.endswith("(among samples 31, 7, 2, 19 of train)")
