"""One file for each sampler: the samples of an epoch, and their order.

A sampler has `epoch(epoch, *, source, seed)`, a pure function that returns the numbers of the epoch's samples, in an array.
Its length must be the same for every epoch.
"""
