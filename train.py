"""The only entry point: `python train.py [group=option ...] [key=value ...]`, also under torchrun."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

if (folder := str(Path(__file__).resolve().parent)) not in sys.path:  # with PYTHONSAFEPATH or -P, Python leaves it out
    sys.path.insert(0, folder)

from framework.runtime.hashes import fix_hashes

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a run watches for signals, Ctrl-C simply ends this process
    fix_hashes()
try:
    from framework.main import entry, main

    if find_spec("torch") is None:  # torch is imported late, because its import takes seconds
        raise ModuleNotFoundError("No module named 'torch'")
except ModuleNotFoundError as error:
    sys.exit(f"{error} in {sys.executable} (pip install -r requirements.txt, or activate the environment that has it)")

__all__ = ["main"]

if __name__ == "__main__":
    entry()
