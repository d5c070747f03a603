"""Cross-entropy over a large vocabulary: torch's numbers, in less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from framework.tasks import cross_entropy
from framework.tasks.cross_entropy import LARGE, cross_entropy_sum
from framework.tasks.language_modeling import LanguageModeling


def sample(rows: int, classes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, classes, generator=draw, dtype=dtype) * 4
    targets = torch.randint(classes, (rows,), generator=draw)
    targets[::5] = -100
    return logits.requires_grad_(), targets


def by_torch(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, reduction="sum", ignore_index=-100)


def ours(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy_sum(logits, targets, ignore_index=-100)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_CHUNK", {"cpu": 3 * LARGE})


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_the_sum_and_its_gradient_are_torch_s(rows: int, dtype: torch.dtype) -> None:
    logits, targets = sample(rows, LARGE, dtype)
    expected, found = by_torch(logits, targets), ours(logits, targets)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)
    (theirs,), (mine,) = (torch.autograd.grad(total * 3, logits) for total in (expected, found))
    assert mine.dtype == dtype
    torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("small_chunks")
def test_nothing_as_large_as_the_logits_is_kept() -> None:
    def kept(total: object) -> int:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            total(logits, targets)  # type: ignore[operator]
        storages.pop(logits.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    logits, targets = sample(64, LARGE, torch.bfloat16)
    assert kept(by_torch) >= 4 * logits.numel()
    assert kept(ours) <= 24 * len(targets)


@pytest.mark.usefixtures("small_chunks")
def test_it_can_be_differentiated_twice() -> None:
    logits, targets = sample(5, LARGE, torch.float64)
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    seconds = []
    for total in (by_torch(logits, targets), ours(logits, targets)):
        (first,) = torch.autograd.grad(total, logits, create_graph=True)
        seconds.append(torch.autograd.grad((first * direction).sum(), logits)[0])
    torch.testing.assert_close(*seconds)


def test_a_target_that_is_no_class_is_torch_s_error() -> None:
    for wrong in (-1, LARGE):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            ours(sample(2, LARGE)[0], torch.tensor([1, wrong]))


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_large_logits_are_as_exact_as_torch_s(offset: float) -> None:
    logits, targets = sample(7, LARGE)
    moved = (logits.detach() + offset).requires_grad_()
    exact = moved.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(by_torch(exact, targets), exact)
    for total in (by_torch, ours):
        (found,) = torch.autograd.grad(total(moved, targets), moved)
        assert (found.double() - expected).norm() / expected.norm() < 1e-6


def test_what_torch_transforms_is_left_to_torch() -> None:
    logits, targets = sample(6, LARGE)
    batches, each = logits.detach().view(3, 2, LARGE), targets.view(3, 2)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(ours))(batches, each), torch.func.vmap(torch.func.grad(by_torch))(batches, each)
    )
    values = (logits.detach(),), (torch.ones_like(logits),)
    torch.testing.assert_close(
        *(torch.func.jvp(lambda x, total=total: total(x, targets), *values) for total in (ours, by_torch))
    )


def test_targets_of_another_type_and_no_rows_are_as_torch_has_them() -> None:
    logits, _ = sample(4, LARGE)
    targets = torch.tensor([1, 250, 7, 0], dtype=torch.uint8)
    torch.testing.assert_close(ours(logits, targets), by_torch(logits, targets.long()))
    nothing = torch.empty(0, LARGE, requires_grad=True)
    ours(nothing, torch.empty(0, dtype=torch.long)).backward()
    assert nothing.grad is not None and nothing.grad.shape == (0, LARGE)


def test_a_language_model_s_loss_is_taken_by_it_where_the_vocabulary_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    task, taken = LanguageModeling(bytes_per_token=None), list[int]()
    plain = cross_entropy._Sum.apply
    monkeypatch.setattr(
        cross_entropy._Sum, "apply", lambda logits, *rest: taken.append(logits.shape[1]) or plain(logits, *rest)
    )
    for classes in (LARGE - 1, LARGE):
        logits, targets = sample(6, classes)
        total, count = task.loss(logits.view(2, 3, classes), targets.view(2, 3))
        torch.testing.assert_close(total, by_torch(logits, targets))
        assert count == 4
    assert taken == [LARGE]
