"""The ranks: World, mesh, process groups over MPI, and who hangs."""
