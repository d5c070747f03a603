"""Sweeps, which run many command lines: grid, search, pools, table."""
