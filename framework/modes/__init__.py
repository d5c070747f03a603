"""What the workers of a run do, one file a mode."""
