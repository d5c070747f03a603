"""Parts of the loop that are methods of their own, or look into a run: they use only what any part can use."""
