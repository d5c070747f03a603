"""Which samples make a step, and one dataset a file."""
