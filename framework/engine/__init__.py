"""The seam between the loop and the strategies, and what the strategies share."""
