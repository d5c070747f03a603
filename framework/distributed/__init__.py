"""The ranks: the World, the mesh, process groups over MPI, and the search for a rank that hangs."""
