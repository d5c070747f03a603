"""`import torchvision` works after `make_torchvision_importable`; each case in a fresh process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def printed_by(code: str) -> str:
    """Run `code` in a fresh Python whose warnings are errors, and return what it printed."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_torchvision_builds_a_model_after_two_calls() -> None:
    code = """
from framework.runtime.torchvision_fix import make_torchvision_importable
make_torchvision_importable()
make_torchvision_importable()
import torch, torchvision
model = torchvision.models.resnet18(weights=None, num_classes=10)
print(tuple(model(torch.zeros(2, 3, 32, 32)).shape))
"""
    assert printed_by(code) == "(2, 10)\n"


def test_call_does_not_import_torchvision() -> None:
    code = """
import sys
from framework.runtime.torchvision_fix import make_torchvision_importable
make_torchvision_importable()
print("torchvision" in sys.modules)
"""
    assert printed_by(code) == "False\n"


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param("importlib.util.find_spec = lambda name: None", id="torchvision-is-missing"),
        pytest.param("torch.ops.load_library = lambda path: None", id="extension-loads"),
    ],
)
def test_call_declares_nothing_where_there_is_nothing_to_cure(situation: str) -> None:
    code = f"""
import importlib.util
import torch
{situation}
from framework.runtime.torchvision_fix import make_torchvision_importable
make_torchvision_importable()
print(hasattr(torch.ops.torchvision, "nms"))
"""
    assert printed_by(code) == "False\n"
