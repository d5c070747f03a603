"""What all tests share: one thread, no network, warnings as errors (pyproject.toml names the exceptions)."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
