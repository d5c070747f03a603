"""The parameter server: remote calls, and its synchronous and its asynchronous mode."""
