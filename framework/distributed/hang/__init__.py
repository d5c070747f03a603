"""Who hangs: where each rank stands, and which of them the others wait for."""
