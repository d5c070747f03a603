"""The claim of a directory and the start of workers: on this machine, under torchrun, as Slurm jobs, on changing nodes."""
