"""How the tokens that a process does not have reach its attention, under context parallelism."""
