"""The search for a rank that hangs: where each rank is, and which rank the others wait for."""
