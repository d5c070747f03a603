"""Claiming a directory and starting workers: on this machine, under torchrun, as Slurm jobs, on nodes that come and go."""
