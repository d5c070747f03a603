"""The architectures, one per file, each complete in itself: to read or change one is to read or change one file."""
