"""The modes that are about an existing run, and what the command line may give them."""

# What the command line may give anew, by mode. The rest is the run's own.
_ANEW = {
    "eval": ("mode", "run.dir", "run.root", "run.checkpoint", "eval", "parallel", "launch", "backend", "precision",
             "micro_batch_size", "dataset.num_workers"),
    "export": ("mode", "run.dir", "run.root", "run.checkpoint", "export"),
}  # fmt: skip


MODES = tuple(_ANEW)
