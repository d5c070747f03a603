"""Every problem, before the start."""
