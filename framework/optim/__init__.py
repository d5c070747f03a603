"""From gradients to the next parameters: optimizers, schedules, clipping, loss scale, moving average, precision."""
