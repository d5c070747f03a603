"""One process and its surroundings: environment, signals, standard streams, log, files, exit codes, Slurm's commands."""
