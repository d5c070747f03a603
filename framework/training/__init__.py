"""The training loop, evaluation, recovery, tracking, speed, profile and recorder."""
