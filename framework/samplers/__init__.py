"""One file for each sampler: the samples of an epoch, and their order.

A sampler has `epoch(epoch, *, source, seed)`, a pure function that returns the numbers of the epoch's samples: an array, or an
object that returns an array for each slice. Its length must be the same for every epoch.
"""
