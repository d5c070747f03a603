"""From gradients to the next parameters: optimizers, schedules, clipping, noise, loss scale, moving average, precision."""
