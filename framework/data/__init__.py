"""The samples of each step, and one file for each dataset."""
