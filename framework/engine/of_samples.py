"""What a micro-batch owes its samples: a row for each in what is averaged over them, and their names in an error."""

from collections.abc import Callable

import torch

from framework.engine.seam import MicroBatch
from framework.engine.sums import Sums, is_weight, weight_of
from framework.modules.tensors import Tree, map_tensors, tensors_in
from framework.runtime.exits import REMARK

TARGETS_REMEDY = "dataset.inputs and dataset.targets say which are which"
_MOST_NAMED = 16


class WrongRows(ValueError):
    """The rows of a micro-batch are not its samples, but sums over the rows would be divided by the number of samples."""


def require_rows(sums: Sums, micro_batch: MicroBatch, *, among: Tree = None) -> None:
    """Raise WrongRows for a sum without a weight if nothing has a row for each sample.

    `among` is what is looked at: by default the targets, or else the inputs.
    """
    unweighted = next((name for name in sums if not is_weight(name) and weight_of(name) not in sums), None)
    if unweighted is None:
        return
    count = micro_batch.num_samples
    found = _num_rows(micro_batch.targets if among is None else among) or _num_rows(micro_batch.inputs)
    if found and count not in found:
        what = f"a micro-batch of {count} samples has {found[0]} rows, but its {unweighted} is divided by the number of samples"
        remedy = "collate and transforms keep a row for each sample; dataset.on_error=skip replaces damaged samples"
        raise WrongRows(f"dataset: {what} ({remedy}; or the task returns pairs of a sum and its weight)")


def _num_rows(tree: Tree) -> list[int]:
    """Return what can be the number of rows in a tree: the first two dims of its tensors, and the length of a list."""
    lengths = [len(tree)] if isinstance(tree, list) else []
    return [size for tensor in tensors_in(tree) for size in tensor.shape[:2]] + lengths


def name_samples(
    error: Exception, micro_batch: MicroBatch, *, narrowed: Callable[[Callable[[Tree], Tree]], object] | None = None
) -> None:
    """Give an error a remark that names the samples of the micro-batch, if it has none.

    `narrowed` repeats the failed work, but not the model, with a function that takes one sample's part of a tree.
    """
    if not hasattr(error, REMARK) and micro_batch.samples:
        names = list(map(str, micro_batch.samples if narrowed is None else _guilty(micro_batch, narrowed)))
        more = ", ..." if len(names) > _MOST_NAMED else ""
        who = f"sample {names[0]}" if len(names) == 1 else f"among samples {', '.join(names[:_MOST_NAMED])}{more}"
        lacking = f", without targets: {TARGETS_REMEDY}" if micro_batch.targets is None else ""
        setattr(error, REMARK, f" ({who} of {micro_batch.split}{lacking})")


def _guilty(micro_batch: MicroBatch, narrowed: Callable[[Callable[[Tree], Tree]], object]) -> list[int]:
    """Return the first sample that fails alone; all samples if no sample does."""
    count = micro_batch.num_samples
    for number, sample in enumerate(micro_batch.samples):

        def part(tree: Tree, number: int = number) -> Tree:
            return map_tensors(lambda t: t[number : number + 1] if t.shape[:1] == (count,) else t, tree)

        try:
            with torch.no_grad():
                narrowed(part)
        except Exception:
            return [sample]
    return list(micro_batch.samples)
