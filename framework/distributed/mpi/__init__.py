"""A process group over MPI, for torch builds that have none."""
