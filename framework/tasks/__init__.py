"""Tasks: the loss, the metrics, and what counts as one sample."""
