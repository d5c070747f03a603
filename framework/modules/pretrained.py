"""Models that their library saves and loads as a folder, with `save_pretrained` and `from_pretrained` (Hugging Face)."""

import copy
import sys
from pathlib import Path
from typing import Any

from torch import nn


def pretrained_part(model: nn.Module) -> str:
    """Return the path of the module that its library can save: the model ("") or a module with the model's whole state.

    ValueError, with the reason, if there is no such module, or if its folder would not contain all trained parameters.
    """
    path, part = "", model
    while not callable(getattr(part, "save_pretrained", None)) or not callable(getattr(type(part), "from_pretrained", None)):
        children = list(part.named_children())
        if len(children) != 1 or not all(name.startswith(f"{children[0][0]}.") for name in part.state_dict()):
            inner = "" if part is model else f", nor has {type(part).__name__} in it"
            raise ValueError(f"{type(model).__name__} has no save_pretrained() and from_pretrained(){inner}")
        path, part = f"{path}.{children[0][0]}".removeprefix("."), children[0][1]
    if (peft := _peft_of(part)) is not None:
        written = {value.data_ptr() for value in peft.get_peft_model_state_dict(part).values()}
        trained = [name for name, parameter in part.named_parameters() if parameter.requires_grad]
        if left_out := [name for name in trained if part.get_parameter(name).data_ptr() not in written]:
            raise ValueError(f"only the adapter would be written, but {left_out[0]} was trained too, and is not in it")
    return path


def write_pretrained(model: nn.Module, folder: Path) -> nn.Module:
    """Let the library save its part of the model; return a copy of the model with the part loaded from the folder again.

    For a model of peft, this is only the adapter. ValueError if names are missing or unexpected when it is loaded.
    """
    if (transformers := sys.modules.get("transformers")) is not None:
        transformers.utils.logging.disable_progress_bar()
    path = pretrained_part(model)
    part = model.get_submodule(path)
    part.save_pretrained(str(folder))  # type: ignore[operator]  # a method: pretrained_part has looked
    read = _read(part, folder).to(next(nn.Module.parameters(part)).dtype).eval()
    if not path:
        return read
    twin = copy.deepcopy(model)
    twin.set_submodule(path, read)
    return twin


def _read(part: nn.Module, folder: Path) -> nn.Module:
    if (peft := _peft_of(part)) is not None:
        twin = copy.deepcopy(part)
        base = twin.get_base_model() if twin.active_peft_config.is_prompt_learning else twin.unload()  # type: ignore[operator, union-attr]
        return peft.PeftModel.from_pretrained(base, str(folder))
    from_pretrained: Any = type(part).from_pretrained  # type: ignore[attr-defined]
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(part, transformers.PreTrainedModel):
        return from_pretrained(str(folder))
    read, report = from_pretrained(str(folder), output_loading_info=True)
    if faults := {kind: sorted(names)[:3] for kind, names in report.items() if names}:
        raise ValueError(f"from_pretrained() reports {faults}")
    return read


def _peft_of(part: nn.Module) -> Any:
    """Return the package peft if the module is a model of peft, without importing it."""
    peft = sys.modules.get("peft")
    return peft if peft is not None and isinstance(part, peft.PeftModel) else None
