"""What the parameter server is made of: remote calls, the exchange of gradients, asynchronous updates."""
