"""Data: which samples make a step, how a process gets them, and one dataset per file."""
