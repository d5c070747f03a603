"""The loop, evaluation, recovery, tracking, speed, profile, recorder."""
