"""Parts of the loop, one file for each: objects that a run calls at named moments (framework/training/parts.py)."""
