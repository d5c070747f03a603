"""Who hangs: where each rank is, and which of them the others wait for."""
