"""The tasks, one per file: losses and metrics."""
