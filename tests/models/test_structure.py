"""Changes of a model: modes that an evaluation gives back."""

from torch import nn

from framework.modules.structure import in_eval_mode


class Stubborn(nn.Module):
    """One part stays in evaluation, by its author's train()."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.other = nn.Dropout(), nn.Dropout()
        self.calls: list[bool] = []

    def train(self, mode: bool = True) -> "Stubborn":
        super().train(mode)
        self.kept.eval()
        self.calls.append(mode)
        return self


def test_an_evaluation_gives_each_module_its_mode_back() -> None:
    model = Stubborn()
    model.train()
    with in_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert (model.training, model.kept.training, model.other.training) == (True, False, True)
    assert model.calls == [True, False, True], "its own train() has been called"
    model.other.eval()
    with in_eval_mode(model):
        pass
    assert (model.kept.training, model.other.training) == (False, False), "what was put into evaluation by hand stays there"
