"""Parts of the loop, one a file: objects that a run calls at named moments (framework/training/parts.py)."""
