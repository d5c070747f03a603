"""One sink per file: what a run's rows are written to, beside `metrics.jsonl`."""
