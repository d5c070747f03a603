"""One task a file: losses and metrics."""
