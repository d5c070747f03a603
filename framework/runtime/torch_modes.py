"""The modes of a thread that torch's contexts change, such as autocast: they are read and set again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import overrides


def thread_modes(devices: Sequence[torch.device]) -> tuple[Any, ...]:
    """Return what `with torch.autocast`, no_grad, torch.device and set_default_dtype change, for `set_thread_modes`."""
    kinds = {"cpu", *(device.type for device in devices)}
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    functions = overrides._get_current_function_mode_stack()
    return torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), torch.get_default_dtype(), autocast, functions


def set_thread_modes(modes: tuple[Any, ...]) -> None:
    """Set the modes of this thread again as `thread_modes` has returned them."""
    is_grad_enabled, is_cache_enabled, default_dtype, autocast, functions = modes
    torch.set_grad_enabled(is_grad_enabled)
    torch.set_autocast_cache_enabled(is_cache_enabled)
    torch.set_default_dtype(default_dtype)
    for kind, is_enabled, dtype in autocast:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in functions:
        overrides._push_mode(mode)
