"""Gradual unfreezing: groups of layers start to train one after the other."""

from fnmatch import fnmatchcase

from framework.modules.parts import nearest_name
from framework.training.loop_view import Loop


class Unfreeze:
    """A part that starts to train groups of parameters, one group after the other.

    `groups` are lists of patterns of parameter names. The first group starts to train after `every` steps, the next after twice
    as many, and so on. Parameters that no pattern matches train from the start.
    A parameter that does not train has no gradient, so neither weight decay nor momentum moves it. Use `trainer.freeze` for
    parameters that never train.
    Source: Howard and Ruder 2018, "Universal language model fine-tuning for text classification", section 3.3.
    """

    def __init__(self, *, groups: list[list[str]], every: int) -> None:
        if every < 1:
            raise ValueError(f"every={every} is out of range (at least 1)")
        self.groups, self.every = groups, every

    def begun(self, loop: Loop) -> None:
        names = [name for part in loop.distinct(list(loop.trained())) for name in part]
        for pattern in (pattern for group in self.groups for pattern in group):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"groups={pattern}: matches no parameter that is trained ({nearest_name(pattern, names)})")

    def gradients_ready(self, loop: Loop) -> None:
        frozen = [pattern for group in self.groups[loop.step // self.every :] for pattern in group]
        for name, parameter in loop.trained().items():
            if any(fnmatchcase(name, pattern) for pattern in frozen):
                parameter.grad = None
