"""Batch-size warm-up: the global batch grows to `global_batch_size`."""


class BatchWarmup:
    """A part that increases the global batch from `start` samples, evenly over the first `samples` samples.

    Each size is a multiple of `multiple_of`.
    The size depends only on the samples seen, not on the number of processes. With a `micro_batch_size`, small batches have
    fewer micro-batches of the same size.
    Source: Smith et al. 2018, "Don't decay the learning rate, increase the batch size".
    """

    def __init__(self, *, start: int, samples: int, multiple_of: int = 1) -> None:
        for name, value in (("start", start), ("samples", samples), ("multiple_of", multiple_of)):
            if value < 1:
                raise ValueError(f"{name}={value} is out of range (at least 1)")
        self.start, self.samples, self.multiple_of = start, samples, multiple_of

    def batch_size(self, samples_seen: int, *, global_batch_size: int) -> int:
        """Return the number of samples in the batch after `samples_seen` samples."""
        if samples_seen >= self.samples:
            return global_batch_size
        size = self.start + (global_batch_size - self.start) * samples_seen // self.samples
        return max(self.multiple_of, size // self.multiple_of * self.multiple_of)
