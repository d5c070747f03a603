"""Compressed gradients for DistributedDataParallel, as communication hooks."""
