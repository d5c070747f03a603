"""The key or option that a misspelt word was probably meant to be."""

import difflib
from collections.abc import Sequence

# What other programs call our keys.
_ALSO_CALLED = {
    "trainer.max_steps": "steps num_steps iterations iters max_iters num_iters train_steps total_steps",
    "trainer.max_epochs": "epochs epoch num_epochs num_train_epochs",
    "trainer.clip_grad_norm": "clip clip_grad grad_clip gradient_clip_val gradient_clip max_grad_norm max_norm",
    "trainer.clip_grad_value": "clip_value grad_clip_value gradient_clip_value",
    "trainer.ema_decay": "ema",
    "global_batch_size": "batch_size batch bs train_batch_size",
    "micro_batch_size": "accumulate_grad_batches gradient_accumulation_steps grad_accum per_device_train_batch_size",
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "wd",
    "scheduler.warmup_steps": "warmup num_warmup_steps warmup_iters",
    "launch.nproc_per_node": "nproc nprocs gpus num_gpus ngpus devices num_devices world_size num_processes",
    "launch.nnodes": "nodes num_nodes",
    "dataset.num_workers": "workers",
    "dataset.root": "data_dir data_path data_root path",
    "dataset.seq_len": "block_size context_length max_seq_len max_length sequence_length",
    "run.root": "output_dir out_dir save_dir log_dir",
    "name": "exp_name experiment_name run_name",
    "model.dim": "hidden_size hidden_dim d_model embed_dim n_embd width",
    "model.channels": "width",
    "model.num_layers": "depth layers n_layer n_layers num_hidden_layers",
    "model.num_heads": "heads n_head n_heads nhead num_attention_heads",
    "model": "arch net network architecture",
    "dataset": "data",
    "optimizer": "opt optim",
    "scheduler": "sched lr_scheduler schedule",
    "parallel": "strategy",
    "precision": "amp mixed_precision dtype",
}


_VAGUE = ("root", "name", "mode", "monitor", "every", "id", "dir", "kind")  # words that mean something else elsewhere


def did_you_mean(word: str, choices: Sequence[str]) -> str:
    """Return `did you mean X?`, X being the nearest of `choices`, or an empty string if nothing is near."""
    meant = nearest(word, choices)
    return f"did you mean {meant}?" if meant else ""


def nearest(word: str, choices: Sequence[str]) -> str | None:
    """Return the one of `choices` that `word` was probably meant to be."""
    word = word.lower().replace("-", "_")
    section, _, last = word.rpartition(".")
    lasts = [choice.rpartition(".")[2] for choice in choices]
    siblings = [choice for choice in choices if choice.rpartition(".")[0] == section]
    if word in choices:
        return word
    if last in lasts and last not in _VAGUE:  # the right word in the wrong place, or without its group
        return choices[lasts.index(last)]
    for choice, names in _ALSO_CALLED.items():
        if last in names.split() and choice in choices:
            return choice
    for candidates, cutoff in ((siblings, 0.7), (choices, 0.75)):
        for close in difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff):
            # the words themselves must be near, whatever section they share
            if difflib.SequenceMatcher(None, last, close.rpartition(".")[2]).ratio() >= (0.7 if section else 0.6):
                return close
        if last in _VAGUE:
            return None
    near = difflib.get_close_matches(last, lasts, n=1, cutoff=0.8 if section else 0.6)
    return choices[lasts.index(near[0])] if near else None
