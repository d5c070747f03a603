"""The search for every problem before the start."""
