"""The only entry point: `python train.py [group=option ...] [key=value ...]`, also under torchrun."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

if (folder := str(Path(__file__).resolve().parent)) not in sys.path:  # with PYTHONSAFEPATH or -P, Python leaves it out
    sys.path.insert(0, folder)

from framework.runtime.environment import fix_hashes

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a run watches for signals, Ctrl-C simply ends this process
    fix_hashes()
try:
    from framework.main import entry, main

    for name in ("hydra", "pydantic", "torch"):  # they are imported late, because not every command needs them
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named '{name}'")
except ModuleNotFoundError as error:
    sys.exit(f"{error} in {sys.executable} (pip install -r requirements.txt, or activate the environment that has it)")

__all__ = ["main"]

if __name__ == "__main__":
    entry()
