"""The key or option that a misspelt word probably means."""

import difflib
from collections.abc import Sequence

# Names of our keys in other programs.
_ALSO_CALLED = {
    "trainer.max_steps": "steps num_steps iterations iters max_iters num_iters train_steps total_steps",
    "trainer.max_epochs": "epochs epoch num_epochs num_train_epochs",
    "trainer.clip_grad_norm": "clip clip_grad grad_clip gradient_clip_val gradient_clip max_grad_norm max_norm",
    "trainer.clip_grad_value": "clip_value grad_clip_value gradient_clip_value",
    "trainer.ema_decay": "ema",
    "trainer.eval_every": "check_val_every_n_epoch val_check_interval eval_steps",
    "trainer.log_every": "log_every_n_steps logging_steps",
    "checkpoint.every": "save_steps every_n_train_steps",
    "checkpoint.keep_last": "save_top_k save_total_limit",
    "seed": "seed_everything",
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
    "run.root": "output_dir out_dir save_dir log_dir default_root_dir paths",
    "name": "exp_name experiment_name run_name task_name",
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

# Keys of other programs that have no counterpart, and how their purpose is reached here.
_DONE_HERE = {
    "accelerator": "the device is found by itself; launch.nproc_per_node says how many processes",
    "callbacks": "early stopping, checkpoints, averaging and profiling are keys of trainer and checkpoint",
    "ckpt_path": "the same command continues its run (run.resume); model.init_from begins with another's weights",
    "debug fast_dev_run limit_train_batches limit_val_batches overfit_batches": "trainer.max_steps=3 makes a short run",
    "deterministic benchmark": "a run gives the same numbers by itself; invariance=bitwise the same bits",
    "hparams_search": "-m with hydra/sweeper=optuna is a search (docs/sweeps.md)",
    "net": "the keys of a model are model.KEY; its class is model._target_",
    "tags": "name=NAME, or run.group=NAME for runs that belong together",
    "train test": "mode=train also measures the test split at its end; mode=eval measures a run that is there",
}

# Names of our options in other programs.
_OPTIONS_ALSO_CALLED = {
    ("precision", "bf16"): "bf16-mixed bf16-true bfloat16",
    ("precision", "fp16"): "16 16-mixed 16-true float16 half",
    ("precision", "fp32"): "32 32-true float32 full",
    ("precision", "fp64"): "64 64-true float64 double",
    ("parallel", "zero"): "deepspeed zero1 deepspeed_stage_1",
    ("parallel", "fsdp"): "zero3 deepspeed_stage_3 fsdp2 fully_shard",
    ("parallel", "zero or fsdp"): "zero2 deepspeed_stage_2",
    ("logger", "none"): "csv jsonl",  # metrics.jsonl is always written
}


def done_here(key: str) -> str:
    """Return how the purpose that a key has in other programs is reached here; empty if that is not known."""
    words = key.lower().split(".")
    return next((text for names, text in _DONE_HERE.items() if set(names.split()) & {words[0], words[-1]}), "")


def option_meant(word: str, group: str, choices: Sequence[str]) -> str:
    """Return `did you mean OPTION?` for a word that is not an option of the group; empty if nothing is near."""
    for (of, option), names in _OPTIONS_ALSO_CALLED.items():
        if of == group and word.lower() in names.split():
            return f"did you mean {option}?"
    return did_you_mean(word, choices)


_VAGUE = ("root", "name", "mode", "monitor", "every", "id", "dir", "kind")  # words with other meanings in other sections


def did_you_mean(word: str, choices: Sequence[str]) -> str:
    """Return `did you mean X?`, X being the nearest of `choices`, or an empty string if nothing is near."""
    meant = nearest(word, choices)
    return f"did you mean {meant}?" if meant else ""


def nearest(word: str, choices: Sequence[str]) -> str | None:
    """Return the choice that `word` probably means."""
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
            # the last words must be similar too, not only a shared section
            if difflib.SequenceMatcher(None, last, close.rpartition(".")[2]).ratio() >= (0.7 if section else 0.6):
                return close
        if last in _VAGUE:
            return None
    near = difflib.get_close_matches(last, lasts, n=1, cutoff=0.8 if section else 0.6)
    return choices[lasts.index(near[0])] if near else None
