"""One sampler a file: which samples an epoch has, and in which order.

A sampler has `epoch(epoch, *, source, seed)`, a pure function that returns the numbers of the epoch's samples: an array, or
what gives an array for each of its slices. Its length is the same for every epoch.
"""
