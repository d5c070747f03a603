"""The weights in a file of torch.save become a file of safetensors."""
