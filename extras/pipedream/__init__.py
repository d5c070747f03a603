"""PipeDream: a pipeline that is not flushed between steps."""
