"""MPI: a back end for the collectives, and the processes that mpirun starts."""
