"""Cross-entropy over a large vocabulary: torch's numbers, in less memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from framework.build import model_changes
from framework.distributed.world import World
from framework.runtime.torch_compiler import has_compiler
from framework.tasks import cross_entropy
from framework.tasks.cross_entropy import LARGE, compiled_cross_entropy_sum, cross_entropy_sum
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
            total(logits, targets)
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


@pytest.mark.parametrize("total", [cross_entropy_sum, compiled_cross_entropy_sum])
def test_too_little_memory_is_not_answered_by_the_way_that_needs_more(total: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for name in ("_Sum.apply", "_refuse_wrong"):
        monkeypatch.setattr(f"framework.tasks.cross_entropy.{name}", fail)
    with pytest.raises(torch.OutOfMemoryError):
        total(*sample(2, LARGE), ignore_index=-100)


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
        total, count = task.loss(logits.view(2, 3, classes), targets.view(2, 3)), task.loss_weight(targets.view(2, 3))
        torch.testing.assert_close(total, by_torch(logits, targets))
        assert count == 4
    assert taken == [LARGE]


@pytest.mark.parametrize("classes", [7, LARGE])
def test_sixteen_bits_are_summed_in_thirty_two(classes: int) -> None:
    logits, targets = sample(64, classes, torch.bfloat16)
    assert torch.equal(ours(logits, targets), ours(logits.float(), targets))
    (mine,), (wide,) = (torch.autograd.grad(ours(given, targets), logits) for given in (logits, logits.float()))
    assert torch.equal(mine, wide) and mine.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")
def test_compiled_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    task, compiled = LanguageModeling(bytes_per_token=None), list[int]()
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *function, **how: compiled.append(1) or plain(*function, **how))
    cross_entropy._compiled.cache_clear()
    logits, targets = sample(6, LARGE, torch.bfloat16)
    task.compile_loss()
    total = task.loss(logits.view(2, 3, LARGE), targets.view(2, 3))
    torch.testing.assert_close(total, by_torch(logits, targets))
    (mine,), (theirs,) = (torch.autograd.grad(given, logits) for given in (total, by_torch(logits, targets)))
    torch.testing.assert_close(mine, theirs)
    assert compiled == [1]
    cross_entropy._compiled.cache_clear()
    batches, each = logits.detach().float().view(3, 2, LARGE), targets.view(3, 2)

    def by_compiler(logits: Tensor, targets: Tensor) -> Tensor:
        return compiled_cross_entropy_sum(logits, targets, ignore_index=-100)

    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(by_compiler))(batches, each), torch.func.vmap(torch.func.grad(by_torch))(batches, each)
    )
    for wrong in (-1, LARGE):  # the compiled function alone would end the process
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            by_compiler(sample(2, LARGE)[0], torch.tensor([1, wrong]))


@pytest.mark.parametrize("has_one", [True, False])
def test_a_task_s_loss_is_compiled_with_the_blocks(has_one: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = list[str]()
    monkeypatch.setattr(model_changes, "has_compiler", lambda: has_one)
    monkeypatch.setattr(model_changes, "compile_blocks", lambda blocks, **how: done.append("blocks"))
    trainer: Any = SimpleNamespace(
        compile=True, compile_dynamic=False, activation_checkpointing=False, activation_offload=False
    )
    run: Any = SimpleNamespace(root=str(tmp_path), dir=str(tmp_path))
    task: Any = SimpleNamespace(compile_loss=lambda: done.append("loss"))
    model_changes.change_model(torch.nn.Linear(2, 2), trainer, task=task, linear=None, world=World.alone(), run=run)
    assert done == (["blocks", "loss"] if has_one else [])
