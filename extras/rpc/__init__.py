"""Remote procedure calls among the processes of a run (torch.distributed.rpc)."""
