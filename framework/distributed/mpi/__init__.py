"""A process group over MPI, for torch builds without MPI."""
