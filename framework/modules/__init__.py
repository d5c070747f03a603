"""What can be asked of, or done to, a module tree and its (sharded, nested) tensors."""
