"""The ranks: the World, the mesh, and the search for a rank that hangs."""
