"""The parameter server: remote calls, the synchronous mode and the asynchronous mode."""
