"""The ways in which a process's attention reads the tokens of other processes, under context parallelism."""
