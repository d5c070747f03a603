"""Compressed gradients for DistributedDataParallel, one communication hook a file.

A hook gets a bucket of this rank's gradients and returns the mean over the ranks, in a future. What compression loses
of a gradient, `int8`, `top_k` and `powersgd` add to the next one (error feedback); that remainder is a rank's own and is
not in a checkpoint.
"""
