"""The parameter server: the synchronous mode and the asynchronous mode."""
