"""Many command lines: grid, search, pools, table."""
