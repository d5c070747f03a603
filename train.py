"""The one entry point: `python train.py [group=option ...] [key=value ...]`, also under torchrun."""

import signal
import sys
from importlib.util import find_spec

from framework.runtime.program import fix_hashes

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a run watches for it, Ctrl-C simply ends this
    fix_hashes()
try:
    from framework.main import entry, main

    if find_spec("torch") is None:  # imported late, since that takes seconds
        raise ModuleNotFoundError("No module named 'torch'")
except ModuleNotFoundError as error:
    sys.exit(f"{error} in {sys.executable} (pip install -r requirements.txt, or activate the environment that has it)")

__all__ = ["main"]

if __name__ == "__main__":
    entry()
